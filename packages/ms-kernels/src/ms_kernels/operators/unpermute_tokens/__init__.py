"""Weighted sums of each token's rows, which lead from the order of experts back to tokens."""
