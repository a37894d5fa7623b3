"""Evaluation: perplexity, size and speed of exported folders in their own runtimes."""
