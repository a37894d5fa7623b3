"""Microbatches of a data rank's rows, and counts summed over data ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.loss import Loss, LossWithStatistics
from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models.batch import MEDIA_NAMES, Batch, check_tokens, slice_rows

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16)
BATCH_FORMAT = (
    "a batch has tokens (B, S) int64, and as needed targets (B, S) int64 (already shifted, -100"
    " for no loss), positions and documents (B, S) integers, weights (B, S), and other tensors with"
    " B rows"
)
SHIFTED = (
    "; pass input_ids as tokens and, as targets, labels shifted left by one with -100 in the last"
    " column"
)


def split_batch(
    batch: Mapping[str, Any],
    size: int | None,
    tensor: int,
    context: int = 1,
    vocabulary: int | None = None,
) -> list[Batch]:
    """Split a batch into microbatches of `size` rows, as CPU tensors, with positions filled in.

    The last one may be smaller.

    Args:
        batch: tensors or arrays (B, S), and media, in the format of `Batch`.
        size: rows per microbatch; None for all rows.
        tensor: number of tensor-parallel ranks that split the sequence between blocks.
        context: number of context-parallel ranks.
        vocabulary: vocabulary size; None if unknown.

    Raises:
        ModelError: a key is missing, or a tensor has the wrong shape or dtype.
        ConfigError: the batch is empty, its sequence length is not divisible by the number of
            ranks, or a token is outside the vocabulary.
    """
    tensors = _checked_tensors(batch)
    count, length = tensors["tokens"].shape
    size = size or count
    if not count:
        raise ConfigError("every data rank must have at least one row per batch, got 0")
    check_length("sequence length", length, tensor=tensor, context=context)
    if vocabulary is not None:
        check_tokens(tensors, vocabulary)
    if "positions" not in tensors:
        tensors["positions"] = torch.arange(length).expand(count, length)  # rows share storage
    return [slice_rows(tensors, start, start + size) for start in range(0, count, size)]


def _checked_tensors(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Convert a batch to tensors; check shapes and dtypes, but not values."""
    if not isinstance(batch, Mapping):
        raise ModelError(f"{BATCH_FORMAT}; got {type(batch).__name__} instead of a mapping")
    tensors = {}
    for name, value in batch.items():
        try:
            tensors[name] = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ModelError(
                f"{BATCH_FORMAT}; got {name!r} as {type(value).__name__}, which is not an array of"
                f" numbers: {' '.join(str(error).split())[:200]}"
            ) from error
    problem = _batch_problem(tensors)
    if problem is not None:
        remedy = SHIFTED if "input_ids" in tensors and "tokens" not in tensors else ""
        raise ModelError(f"{problem}: {BATCH_FORMAT}; got {describe_batch(tensors)}{remedy}")
    return tensors | {n: tensors[n].long() for n in ("tokens", "targets") if n in tensors}


def _batch_problem(tensors: Mapping[str, Tensor]) -> str | None:
    tokens = tensors.get("tokens")
    if tokens is None:
        return "the batch has no 'tokens'"
    if tokens.ndim != 2:
        return f"tokens must have 2 dims, not {tokens.ndim}"
    for name in ("tokens", "targets", "positions", "documents"):
        if name in tensors and tensors[name].dtype not in INTEGERS:
            return f"{name} must be integers, not {_dtype(tensors[name])}"
    for name in ("targets", "positions", "documents", "weights"):
        if name in tensors and tensors[name].shape != tokens.shape:
            return f"{name} and tokens must have the same shape"
    for name, value in tensors.items():
        if name not in MEDIA_NAMES and value.shape[:1] != tokens.shape[:1]:
            return f"{name} must have the {len(tokens)} rows of tokens"
    return None


def describe_batch(batch: Batch) -> str:
    """Format keys, shapes and dtypes for messages."""
    parts = [f"{name} {tuple(value.shape)} {_dtype(value)}" for name, value in batch.items()]
    return ", ".join(parts) or "an empty batch"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@contextmanager
def explain_missing_keys(batch: Batch) -> Iterator[None]:
    """Turn a KeyError of the loss for a missing batch key into an error that shows the batch.

    Raises:
        ModelError: the loss read a key that the batch does not have.
    """
    try:
        yield
    except KeyError as error:
        key = error.args[0] if error.args else None
        if not isinstance(key, str) or key in batch:
            raise
        raise ModelError(
            f"the batch must have {key!r}, which the loss reads: {BATCH_FORMAT}; got"
            f" {describe_batch(batch)}"
        ) from error


def check_length(label: str, length: int, **parts: int) -> None:
    """Check that a sequence length is divisible by the axes that split it.

    Raises:
        ConfigError: it is not; names the axes.
    """
    if length % prod(parts.values()):
        axes = " and ".join(f"{axis}={size}" for axis, size in parts.items() if size > 1)
        raise ConfigError(
            f"{label} must be a multiple of {prod(parts.values())} for {axes}, got {length}"
        )


SumOverRows = Callable[[Tensor], Tensor]
"""Sums (local microbatches, n) float64 CPU values over the global batch, to (n,)."""


def measure(microbatches: Sequence[Batch], loss: Loss | LossWithStatistics) -> Tensor:
    """Return loss weight and token count of each local microbatch, (n, 2) float64 on the CPU."""
    counts = []
    for microbatch in microbatches:
        with explain_missing_keys(microbatch):
            counts.append((loss.weight(microbatch), microbatch["tokens"].numel()))
    return torch.tensor(counts, dtype=torch.float64)


def gather_over_rows(numbers: Tensor, groups: Groups) -> Tensor:
    """Gather float64 numbers (n,) on the CPU from all data ranks, to (data ranks, n).

    Each number is sent as a sum of two float32 numbers. Integers below 2^48 are exact.
    """
    count = groups.place.count
    if count == 1:
        return numbers[None]
    coarse = numbers.float()  # high part; the remainder fits a second float32
    words = torch.stack((coarse, (numbers - coarse).float()))  # (2, n)
    # Exchanged through host memory, so no rank waits for its device.
    parts = [torch.empty_like(words) for _ in range(count)]
    dist.all_gather(parts, words, group=groups.group("rows"))
    return torch.stack(parts).double().sum(1)  # (ranks, 2, n) -> (ranks, n)


def sum_over_rows(numbers: Tensor, groups: Groups) -> Tensor:
    """Sum float64 numbers (n,) on the CPU over the data ranks."""
    return gather_over_rows(numbers, groups).sum(0)
