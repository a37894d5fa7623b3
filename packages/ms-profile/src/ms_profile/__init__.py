"""Distributed event log, low-overhead timing, trace analysis, and one report of where the time goes."""

__version__ = "0.1.0"

__all__ = ["__version__"]
