"""Attention of one new query a sequence over keys and values kept in pages."""
