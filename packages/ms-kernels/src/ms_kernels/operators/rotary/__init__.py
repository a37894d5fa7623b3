"""Rotary position embedding (Su et al., 2021), full or partial, in halves or interleaved."""
