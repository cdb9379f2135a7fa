"""`bench`: what the smaller cache buys in speed and memory."""
