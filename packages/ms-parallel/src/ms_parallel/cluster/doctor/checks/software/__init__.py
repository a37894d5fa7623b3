"""Checks of what is installed: whether versions go together, and are the same on all ranks."""
