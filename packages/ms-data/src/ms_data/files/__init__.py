"""Writes files that last, and reads files that others may have written or damaged."""
