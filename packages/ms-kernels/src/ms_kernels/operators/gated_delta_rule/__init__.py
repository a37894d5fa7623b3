"""Gated delta rule: linear attention with a recurrent state instead of a key-value cache."""
