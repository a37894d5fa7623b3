"""Optimizers, a file each, with their settings; `optimizer.optimizers` finds them."""
