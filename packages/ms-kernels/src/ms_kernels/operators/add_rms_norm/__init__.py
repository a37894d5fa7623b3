"""A residual sum and its root mean square normalisation, in one pass over memory."""
