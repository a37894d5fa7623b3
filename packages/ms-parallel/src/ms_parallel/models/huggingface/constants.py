"""Constants to which constructors of transformers' models set parameters and buffers.

Most initial values come from a model's `_init_weights`. A few, such as the two slopes of xIELU,
are set only by a constructor, and a model built without storage loses them. They are read from a
small model of the same type, built with storage.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from ms_parallel.models.huggingface.config import TransformersModel, transformers
from ms_parallel.models.huggingface.small import small_model


def constant_of(config: TransformersModel, name: str) -> float | None:
    """Return the initial value that all elements of a parameter or buffer share.

    Args:
        config: configuration of the model.
        name: full name of the parameter or buffer.

    Returns:
        None if its elements differ in a small model, or if transformers cannot build one.
    """
    return _constants(config, torch.get_default_dtype()).get(_pattern(name))


@lru_cache(maxsize=16)
def _constants(config: TransformersModel, dtype: torch.dtype) -> Mapping[str, float]:
    """Map name patterns to the value that is constant there in two small models."""
    auto: Any = transformers().AutoModelForCausalLM
    values: dict[str, set[float]] = {}
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        for seed in (0, 1):  # a drawn value differs between the two
            torch.manual_seed(seed)
            try:
                settings = small_model(config).settings
                settings = type(settings).from_dict(settings.to_dict())
                model = auto.from_config(settings, attn_implementation="eager", dtype=dtype)
            except Exception:  # transformers rejects settings in many ways; no constant is known
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
