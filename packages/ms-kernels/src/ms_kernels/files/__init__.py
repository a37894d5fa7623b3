"""Reads files that others may have written or damaged."""
