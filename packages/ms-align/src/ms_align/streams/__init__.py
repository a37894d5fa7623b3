"""Training data streams."""
