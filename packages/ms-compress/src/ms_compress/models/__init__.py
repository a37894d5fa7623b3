"""Models as torch modules: their layers and head, their logits, and all tensors one by one."""
