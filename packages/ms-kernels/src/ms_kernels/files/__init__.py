"""Reads files without trusting their content."""
