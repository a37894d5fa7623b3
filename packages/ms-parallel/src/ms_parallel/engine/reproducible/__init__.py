"""Updates that are bitwise independent of which process computes what."""
