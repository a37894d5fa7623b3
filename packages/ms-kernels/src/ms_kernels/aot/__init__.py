"""Operator libraries for one chip, built ahead of time on a machine without that chip."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
