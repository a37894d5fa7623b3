"""Quantisation: schemes, the arithmetic of rounding, and layers that compute as a target will."""
