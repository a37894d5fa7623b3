"""The checks, one per file; each registers itself with `check`."""
