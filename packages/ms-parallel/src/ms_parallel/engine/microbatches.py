"""Cuts a data rank's rows into microbatches, and weighs them among all rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.loss import Loss, LossWithStatistics
from ms_parallel.errors import ConfigError
from ms_parallel.models.batch import Batch


def cut_batch(batch: Mapping[str, Any], size: int | None, tensor: int) -> list[Batch]:
    """Microbatches of `size` rows (None: all of them) as CPU tensors, positions filled in.

    Where they do not divide, the last is smaller.

    Args:
        batch: tensors or arrays (b, S) as in the Batch seam.
        size: rows of a microbatch.
        tensor: ranks that split the sequence.

    Raises:
        ConfigError: there are no rows, or the sequence does not divide over `tensor`.
    """
    tensors = {name: torch.as_tensor(value) for name, value in batch.items()}
    count, length = tensors["tokens"].shape
    size = size or count
    if not count:
        raise ConfigError("a batch of 0 rows on a data rank; give each at least one")
    if length % tensor:
        raise ConfigError(
            f"sequence length {length} does not divide over tensor={tensor}; "
            "choose a multiple of it"
        )
    if "positions" not in tensors:
        tensors["positions"] = torch.arange(length).expand(count, length)
    return [
        {name: value[start : start + size] for name, value in tensors.items()}
        for start in range(0, count, size)
    ]


def measure(
    microbatches: Sequence[Batch], loss: Loss | LossWithStatistics, groups: Groups
) -> tuple[float, int]:
    """Weight and number of tokens of the global batch, of which these are this data rank's part."""
    weight = sum(loss.weight(microbatch) for microbatch in microbatches)
    tokens = sum(microbatch["tokens"].numel() for microbatch in microbatches)
    if groups.place.count == 1:
        return weight, tokens
    # Two float32 words a number: exact to 2^48, on devices without float64 collectives too.
    total = torch.tensor([weight, tokens], dtype=torch.float64)
    coarse = total.float()
    fine = (total - coarse).float()
    both = groups.all_reduce(torch.cat([coarse, fine]).to(groups.device), "rows").tolist()
    return both[0] + both[2], round(both[1] + both[3])
