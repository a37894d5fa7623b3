"""Rows sorted by the experts of their tokens, so that the rows of an expert are consecutive."""
