"""Cuts a data rank's rows into microbatches, and weighs them among all rows."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.loss import Loss, LossWithStatistics
from ms_parallel.errors import ConfigError
from ms_parallel.models.batch import Batch


def cut_batch(
    batch: Mapping[str, Any], size: int | None, tensor: int, context: int = 1
) -> list[Batch]:
    """Microbatches of `size` rows (None: all of them) as CPU tensors, positions filled in.

    Where they do not divide, the last is smaller.

    Args:
        batch: tensors or arrays (b, S) as in the Batch seam.
        size: rows of a microbatch.
        tensor: ranks that split the sequence between matrices.
        context: ranks that share out the sequence.

    Raises:
        ConfigError: there are no rows, or the sequence does not divide over those ranks.
    """
    tensors = {name: torch.as_tensor(value) for name, value in batch.items()}
    count, length = tensors["tokens"].shape
    size = size or count
    if not count:
        raise ConfigError("a batch of 0 rows on a data rank; give each at least one")
    check_length("sequence length", length, tensor=tensor, context=context)
    if "positions" not in tensors:
        tensors["positions"] = torch.arange(length).expand(count, length)
    return [
        {name: value[start : start + size] for name, value in tensors.items()}
        for start in range(0, count, size)
    ]


def check_length(what: str, length: int, **parts: int) -> None:
    """Check that a row's length divides over the axes that split it.

    Raises:
        ConfigError: it does not.
    """
    if length % prod(parts.values()):
        axes = " and ".join(f"{axis}={size}" for axis, size in parts.items() if size > 1)
        multiple = "it" if axes.count("=") == 1 else str(prod(parts.values()))
        raise ConfigError(
            f"{what} {length} does not divide over {axes}; choose a multiple of {multiple}"
        )


def measure(
    microbatches: Sequence[Batch], loss: Loss | LossWithStatistics, groups: Groups
) -> tuple[float, int]:
    """Weight and number of tokens of the global batch, of which these are this data rank's part."""
    weight = sum(loss.weight(microbatch) for microbatch in microbatches)
    tokens = sum(microbatch["tokens"].numel() for microbatch in microbatches)
    total = sum_over_rows(torch.tensor([weight, tokens], dtype=torch.float64), groups)
    return float(total[0]), round(float(total[1]))


def sum_over_rows(numbers: Tensor, groups: Groups) -> Tensor:
    """Each of some float64 numbers on the CPU, added up over the processes that read other rows.

    They travel as two float32 words each, as not every device has float64 collectives, and are
    added here: a sum of the words would round to float32.
    """
    count = groups.place.count
    if count == 1:
        return numbers
    coarse = numbers.float()
    words = torch.stack((coarse, (numbers - coarse).float())).to(groups.device)
    parts = [torch.empty_like(words) for _ in range(count)]
    dist.all_gather(parts, words, group=groups.group("rows"))
    return torch.stack(parts).cpu().double().sum((0, 1))
