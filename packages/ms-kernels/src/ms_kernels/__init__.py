"""Fused operators with one typed API and several backends, each tested against a reference."""

from typing import Any

import lazy_loader

from ms_kernels.torch_import import without_numpy_warning

__version__ = "0.1.0"

_resolve, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted([*_names, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a public name, and torch with it, on first access."""
    with without_numpy_warning():
        return _resolve(name)
