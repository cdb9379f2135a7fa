"""`eval`: perplexity and all other measures, one by one or as a suite, and their reports."""
