"""Cuts a data rank's rows into microbatches, and weighs them among all rows."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.loss import Loss, LossWithStatistics
from ms_parallel.errors import ConfigError
from ms_parallel.models.batch import Batch, check_tokens, cut_rows


def cut_batch(
    batch: Mapping[str, Any],
    size: int | None,
    tensor: int,
    context: int = 1,
    vocabulary: int | None = None,
) -> list[Batch]:
    """Cut microbatches of `size` rows (None: all) as CPU tensors, with positions filled in.

    Where they do not divide, the last is smaller.

    Args:
        batch: tensors or arrays (b, S), and pictures, as in the Batch seam.
        size: rows of a microbatch.
        tensor: ranks that split the sequence between matrices.
        context: ranks that share out the sequence.
        vocabulary: tokens that the model knows; None where it does not say.

    Raises:
        ConfigError: there are no rows, the sequence does not divide over those ranks, or the
            vocabulary does not hold a token.
    """
    tensors = {name: torch.as_tensor(value) for name, value in batch.items()}
    count, length = tensors["tokens"].shape
    size = size or count
    if not count:
        raise ConfigError("a batch of 0 rows on a data rank; give each at least one")
    check_length("sequence length", length, tensor=tensor, context=context)
    if vocabulary is not None:
        check_tokens(tensors, vocabulary)
    if "positions" not in tensors:
        tensors["positions"] = torch.arange(length).expand(count, length)
    return [cut_rows(tensors, start, start + size) for start in range(0, count, size)]


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


SumOverRows = Callable[[Tensor], Tensor]
"""Sums (microbatches here, n) float64 CPU values over the global batch, to (n,)."""


def measure(
    microbatches: Sequence[Batch], loss: Loss | LossWithStatistics, sum_over_rows: SumOverRows
) -> tuple[float, int]:
    """Return the loss weight and the tokens of the global batch, given this data rank's part."""
    local = [(loss.weight(each), each["tokens"].numel()) for each in microbatches]
    weight, tokens = sum_over_rows(torch.tensor(local, dtype=torch.float64)).tolist()
    return weight, round(tokens)


def sum_over_rows(numbers: Tensor, groups: Groups) -> Tensor:
    """Add up float64 numbers on the CPU, each over the processes that read other rows.

    They travel as two float32 words each, as not every device has float64 collectives, and are
    added here: a sum of the words would round to float32.
    """
    count = groups.place.count
    if count == 1:
        return numbers
    coarse = numbers.float()
    words = torch.stack((coarse, (numbers - coarse).float())).to(groups.wire)
    parts = [torch.empty_like(words) for _ in range(count)]
    dist.all_gather(parts, words, group=groups.group("rows"))
    return torch.stack(parts).cpu().double().sum((0, 1))
