"""Access to torch models: layers, output head, logits, and all tensors one at a time."""
