"""Batches for training, from a dataset on disk."""
