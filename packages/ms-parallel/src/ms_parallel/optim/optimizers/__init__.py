"""Optimizers with their settings, one per file; registered by `optimizer.optimizers`."""
