"""Subcommands for cleaning, deduplication and exchange, each a thin wrapper over one function."""
