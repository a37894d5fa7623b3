"""Fused operators with one typed face and many backends, each proved against a reference."""

__version__ = "0.1.0"

__all__ = ["__version__"]
