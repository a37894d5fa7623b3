"""Event log, profiler, trace analysis and HTML report for distributed PyTorch training.

Public names are imported lazily, so `--help` does not wait for numpy; `__init__.pyi` lists the
module that defines each name.
"""

import lazy_loader

from ms_profile.version import __version__ as __version__

__getattr__, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted([*_names, "__version__"])
