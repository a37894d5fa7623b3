"""Distributed event log, low-overhead timing, trace analysis, and one report on the time."""

__version__ = "0.1.0"

__all__ = ["__version__"]
