"""Parsers of a recording: its files and command outputs."""
