"""Updates that are bitwise identical under every layout."""
