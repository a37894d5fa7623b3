"""Encoding text as tokens, decoding, and tokenizer training."""
