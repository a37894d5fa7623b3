"""Training batches from a dataset on disk."""
