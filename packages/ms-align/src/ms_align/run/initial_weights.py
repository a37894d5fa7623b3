"""The weights that a run begins with, as a checksum: other ones make another run."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ms_align import processes
from ms_align.engines.protocol import Engine


def weights_checksum(engine: Engine) -> str:
    """Compute a checksum of all weights an engine computes with; "" where processes share them."""
    holder = engine if engine.module is None else engine.module
    return _checksum(holder.state_dict())


def frozen_checksum(engine: Engine) -> str:
    """Compute a checksum of the weights that no checkpoint holds: those that take no gradient."""
    if engine.module is None:
        return ""
    named = engine.module.named_parameters()
    frozen = {name: parameter for name, parameter in named if not parameter.requires_grad}
    return _checksum(frozen) if frozen else ""


def name_of(model: Any) -> str:
    """Return what a run's folder calls a model: its folder, or its class."""
    if model is None or isinstance(model, str | Path):
        return str(model or "")
    return str(getattr(model, "__qualname__", type(model).__qualname__))


def _checksum(state: Mapping[str, Tensor]) -> str:
    if processes.count() > 1:
        return ""
    found = 0
    for name in sorted(state):
        if not name.startswith(("optimizer.", "engine.")):
            content = state[name].detach().cpu().contiguous().flatten().view(torch.uint8)
            found = zlib.crc32(content.numpy().tobytes(), found)
    return f"{found:08x}"
