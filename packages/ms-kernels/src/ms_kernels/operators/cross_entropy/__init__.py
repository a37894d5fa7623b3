"""Cross-entropy of logits against class indices, with label smoothing and z-loss."""
