"""Cross-entropy of ``hidden @ weight.T``, whose logits are never held all at once."""
