"""Processes on unlike devices in one run: which rank has which, and how their sums travel."""
