"""Supervised fine-tuning, reward models, DPO, PPO, GRPO and RLOO on any engine.

Public names are imported lazily, so that `--help` does not wait for torch; `__init__.pyi` lists
the module of each.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted([*_names, "__version__"])
