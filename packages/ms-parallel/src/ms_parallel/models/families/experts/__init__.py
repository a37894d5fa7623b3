"""Families of decoders with mixtures of experts."""
