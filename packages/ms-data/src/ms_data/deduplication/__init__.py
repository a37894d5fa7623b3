"""Finds documents, and parts of documents, that stand in a corpus more than once."""
