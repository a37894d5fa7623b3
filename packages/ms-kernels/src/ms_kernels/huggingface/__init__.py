"""Use the operators in transformers models: `patch`, and attention functions by name."""
