"""Root mean square normalisation (Zhang and Sennrich, 2019)."""
