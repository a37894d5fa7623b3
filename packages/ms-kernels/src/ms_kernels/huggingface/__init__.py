"""The operators inside models of transformers: `patch`, and attention by name."""
