"""Quantization-aware training, GPTQ, sparsity, distillation and export of language models.

Public names are imported lazily, so `--help` does not import torch; `__init__.pyi` lists the
module that defines each name.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, _lazy = lazy_loader.attach_stub(__name__, __file__)

__all__ = sorted([*_lazy, "__version__"])
