"""Builds a folder of shards from a corpus."""
