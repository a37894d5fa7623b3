"""Rollout engines; the name of each module here is a value of the setting `generator`.

A module defines `build(policy, *, max_num_seqs, decode)`, which returns a `Generator`.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import cast

from ms_align.errors import ConfigError
from ms_align.generation.responses import Generator
from ms_align.settings import nearest

__all__ = ["build_generator"]


def build_generator(name: str) -> Callable[..., Generator]:
    """Return the function that builds a rollout engine.

    Raises:
        ConfigError: the name is unknown.
    """
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    if name not in names:
        raise ConfigError(f"generator {name!r} is unknown; {nearest(name, names)}")
    module = importlib.import_module(f"{__name__}.{name}")
    return cast(Callable[..., Generator], module.build)
