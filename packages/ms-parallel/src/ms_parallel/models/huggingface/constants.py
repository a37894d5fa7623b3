"""Initial values that transformers' constructors, not `_init_weights`, assign.

Most initial values come from a model's `_init_weights`. A few, such as the two slopes of xIELU,
are assigned in a constructor and lost when the model is built on the meta device. They are read
from a small model of the same type built on the CPU.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from ms_parallel.models.huggingface.config import TransformersModel, transformers
from ms_parallel.models.huggingface.small import small_model


def constant_of(config: TransformersModel, name: str) -> float | None:
    """Return the constant that a parameter or buffer is initialized to.

    Args:
        config: configuration of the model.
        name: full name of the parameter or buffer.

    Returns:
        None if its elements are not all equal, or if transformers cannot build a small model.
    """
    return _constants(config, torch.get_default_dtype()).get(_pattern(name))


@lru_cache(maxsize=16)
def _constants(config: TransformersModel, dtype: torch.dtype) -> Mapping[str, float]:
    """Map name patterns to the value that is the same in two small models with other seeds."""
    auto: Any = transformers().AutoModelForCausalLM
    values: dict[str, set[float]] = {}
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        for seed in (0, 1):  # random values differ between the seeds
            torch.manual_seed(seed)
            try:
                settings = small_model(config).settings
                settings = type(settings).from_dict(settings.to_dict())
                model = auto.from_config(settings, attn_implementation="eager", dtype=dtype)
            except Exception:  # transformers rejects settings with errors of many types
                return {}
            for name, value in (*model.named_parameters(), *model.named_buffers()):
                if value.is_floating_point():
                    values.setdefault(_pattern(name), set()).update(value.unique().tolist())
    return {
        name: unique_values.pop()
        for name, unique_values in values.items()
        if len(unique_values) == 1
    }


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
