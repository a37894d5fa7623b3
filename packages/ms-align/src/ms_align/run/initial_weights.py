"""Checksum of a run's initial weights, which identifies the run when it resumes."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ms_align import processes
from ms_align.engines.protocol import Engine


def weights_checksum(engine: Engine) -> str:
    """Checksum of all weights of an engine; "" if they are sharded over several processes."""
    holder = engine if engine.module is None else engine.module
    return _checksum(holder.state_dict())


def frozen_checksum(engine: Engine) -> str:
    """Checksum of the frozen weights, which are not in checkpoints."""
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
    checksum = 0
    for name in sorted(state):
        if not name.startswith(("optimizer.", "engine.")):
            tensor = state[name].detach()
            if isinstance(tensor, DTensor):  # FSDP shards a module even over a single rank
                tensor = tensor.full_tensor()
            content = tensor.cpu().contiguous().flatten().view(torch.uint8)
            checksum = zlib.crc32(content.numpy().tobytes(), checksum)
    return f"{checksum:08x}"
