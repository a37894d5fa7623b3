"""Text to tokens and back, and training a tokenizer."""
