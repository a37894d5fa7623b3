"""Distributed event log, low-overhead timing, trace analysis, and one report on the time.

Names are imported when they are first used, so that a command's help need not wait for numpy;
`__init__.pyi` says where each comes from.
"""

import lazy_loader

from ms_profile.version import __version__ as __version__

__getattr__, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted([*_names, "__version__"])
