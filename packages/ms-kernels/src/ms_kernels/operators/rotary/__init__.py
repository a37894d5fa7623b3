"""Rotary position embedding (Su and others, 2021), whole or partial, in halves or interleaved."""
