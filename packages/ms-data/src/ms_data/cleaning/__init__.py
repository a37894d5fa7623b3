"""Cleans documents by named rules, each a module of `rules`."""
