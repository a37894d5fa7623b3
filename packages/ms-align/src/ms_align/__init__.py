"""Instruction tuning, reward models, PPO and its kin: exact, resumable, alone or on any engine."""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted([*__all__, "__version__"])
