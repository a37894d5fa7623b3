"""What a run begins with, as a number that its checkpoints keep: other weights make another run."""

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ms_align import processes
from ms_align.engine import Engine

__all__ = ["checksum_of", "weights_checksum"]


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
