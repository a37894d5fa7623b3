"""Cross-entropy of ``hidden @ weight.T``, in chunks of logits."""
