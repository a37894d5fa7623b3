"""Quantization: schemes, rounding arithmetic, and layers that compute like their target."""
