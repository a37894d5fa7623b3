"""Quantisation-aware training, sparsity, distillation and export: what was trained is deployed.

Names are imported when they are first asked for, so that the command's `--help` needs no torch;
where each comes from is in `__init__.pyi`.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, _lazy = lazy_loader.attach_stub(__name__, __file__)

__all__ = sorted([*_lazy, "__version__"])
