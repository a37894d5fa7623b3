"""What a run begins with, as a number that its checkpoints keep: other weights make another run."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ms_align import processes
from ms_align.engines.protocol import Engine

__all__ = ["checksum_of", "frozen_checksum", "name_of", "weights_checksum"]


def weights_checksum(state: Mapping[str, Tensor]) -> int | None:
    """Of an engine's weights, without moments and counters; None where processes share them."""
    if processes.count() > 1:
        return None
    found = 0
    for name in sorted(state):
        if not name.startswith(("optimizer.", "engine.")):
            content = state[name].detach().cpu().contiguous().flatten().view(torch.uint8)
            found = zlib.crc32(content.numpy().tobytes(), found)
    return found


def checksum_of(engine: Engine) -> int | None:
    """Of all weights that an engine computes with, also those that take no gradient."""
    module = getattr(engine, "module", None)
    holder = module if isinstance(module, nn.Module) else engine
    return weights_checksum(holder.state_dict())


def frozen_checksum(engine: Engine) -> str:
    """Of the weights that take no gradient, which no checkpoint holds; "" where there are none."""
    module = getattr(engine, "module", None)
    if not isinstance(module, nn.Module):
        return ""
    frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    found = weights_checksum(frozen) if frozen else None
    return "" if found is None else f"{found:08x}"


def name_of(model: Any) -> str:
    """What a run's folder calls a model: its folder, or its class."""
    if model is None or isinstance(model, str | Path):
        return str(model or "")
    return str(getattr(model, "__qualname__", type(model).__qualname__))
