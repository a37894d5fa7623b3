"""Chat rendering with the tokenizer's chat template."""
