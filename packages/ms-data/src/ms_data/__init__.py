"""Tokenize, shard, shuffle and stream a text corpus, with exact resume.

Names are imported on first use, so that `ms-data --help` does not wait for numpy; `__init__.pyi`
lists the module of every name.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted([*_names, "__version__"])
