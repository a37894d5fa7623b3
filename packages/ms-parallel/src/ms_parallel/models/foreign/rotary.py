"""Float32 tables of rotary positions in models of transformers."""

from typing import Any

import torch
from torch import Tensor, nn


def keep_tables_float32(model: nn.Module) -> None:
    """Make a model's rotary embeddings return float32 where hidden states are narrower, in place.

    They compute cosines and sines in float32 and round them to the dtype of the hidden states, of
    which they read nothing else. So they are given float32 ones, of the same shape and without
    storage.
    """
    for module in model.modules():
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            module.register_forward_pre_hook(_widen_hidden, with_kwargs=True)


def _widen_hidden(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tuple(map(_widen, args)), {name: _widen(value) for name, value in kwargs.items()}


def _widen(value: Any) -> Any:
    if not (isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)):
        return value
    return value.new_empty((), dtype=torch.float32).expand(value.shape)
