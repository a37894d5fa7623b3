"""Base classes of the offline and online trainers."""
