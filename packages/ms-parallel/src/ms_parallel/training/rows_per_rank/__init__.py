"""Rows of the global batch per data rank, fixed or rebalanced by measured speed."""
