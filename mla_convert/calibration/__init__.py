"""Texts to windows of tokens, and one pass of them through the source for the moments of every layer."""
