"""The checks, one a file: each registers itself with `check`, and nothing else names it."""
