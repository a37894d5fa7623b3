"""Cleans documents with named rules; every module of `rules` defines one."""
