"""Damaged input for every command of the six packages; `nox -s fuzz`."""
