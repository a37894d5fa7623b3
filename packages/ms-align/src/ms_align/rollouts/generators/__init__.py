"""Rollout engines; the name of each module here is a value of the setting `generator`.

A module defines `build(policy, *, max_num_seqs, decode, vllm, folder, max_staleness,
routed_layers)`, which returns a `RolloutEngine`.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import cast

from ms_align.errors import ConfigError
from ms_align.generation.responses import RolloutEngine
from ms_align.settings import nearest

__all__ = ["rollout_engine_builder"]


def rollout_engine_builder(name: str) -> Callable[..., RolloutEngine]:
    """Return the function that builds a rollout engine.

    Raises:
        ConfigError: the name is unknown.
    """
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    if name not in names:
        raise ConfigError(f"generator {name!r} is unknown; {nearest(name, names)}")
    module = importlib.import_module(f"{__name__}.{name}")
    return cast(Callable[..., RolloutEngine], module.build)
