"""Sums the expert rows of each token with weights, and restores the order of the tokens."""
