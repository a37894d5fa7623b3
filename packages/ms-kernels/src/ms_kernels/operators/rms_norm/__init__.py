"""Root mean square normalization (Zhang and Sennrich, 2019)."""
