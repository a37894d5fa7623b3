"""Decode attention: one new query per sequence over a paged key-value cache."""
