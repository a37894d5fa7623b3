"""Finds duplicate documents, and repeated parts of documents."""
