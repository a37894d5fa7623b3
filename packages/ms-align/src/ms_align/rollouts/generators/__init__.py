"""Rollout engines: each module here is one, and its name is what `generator` calls it.

A module has `build(policy, *, slots, decode)`, which gives a `Generator`.
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
    """Find the function that builds a rollout engine.

    Raises:
        ConfigError: there is no such engine.
    """
    known = [module.name for module in pkgutil.iter_modules(__path__)]
    if name not in known:
        raise ConfigError(f"generator is {name!r}; {nearest(name, known)}")
    module = importlib.import_module(f"{__name__}.{name}")
    return cast(Callable[..., Generator], module.build)
