"""Checks of installed software: compatible versions, equal on all ranks."""
