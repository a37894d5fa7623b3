"""Optimizers, learning rate decays, gradient clipping and loss scaling."""
