"""Causal language models, reward models and tokenizers, from disk and in memory."""
