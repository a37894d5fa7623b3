"""Checksums of the initial weights, which identify a run when it resumes."""

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
    """Return a checksum of all weights; "" if they are sharded over several processes."""
    source = engine if engine.module is None else engine.module
    return _checksum(source.state_dict())


def frozen_checksum(engine: Engine) -> str:
    """Return a checksum of the frozen weights, which are not in checkpoints."""
    if engine.module is None:
        return ""
    params = engine.module.named_parameters()
    frozen = {name: parameter for name, parameter in params if not parameter.requires_grad}
    return _checksum(frozen) if frozen else ""


def model_name(model: Any) -> str:
    """Return a model's name in the run record: its folder or its class."""
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
