"""A residual sum and its root mean square normalization, in one pass over memory."""
