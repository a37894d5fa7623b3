"""Weighted sums of each token's rows, from the order of experts back to the order of tokens."""
