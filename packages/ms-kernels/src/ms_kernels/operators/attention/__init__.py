"""Scaled dot-product attention with grouped queries, documents, a window and a cache."""
