"""Process layouts, pipeline schedules, sharded models and the trainer that runs them.

Names are imported on first use, so a command's `--help` does not import torch; `__init__.pyi` lists
their modules.
"""

import lazy_loader

from ms_parallel.version import __version__ as __version__

__getattr__, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted([*_names, "__version__"])
