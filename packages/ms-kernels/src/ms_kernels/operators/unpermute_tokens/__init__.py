"""The way back from rows in order of expert to tokens, weighted sums of their choices."""
