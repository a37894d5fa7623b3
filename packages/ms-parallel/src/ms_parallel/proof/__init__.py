"""Verifies a model under random layouts against one process: every gradient, and no leaks."""
