"""Finds the largest microbatch that fits into memory, by prediction and by trial."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ms_parallel.engine.loss import Loss
from ms_parallel.errors import ConfigError
from ms_parallel.files.durable import write_file, writing
from ms_parallel.files.untrusted import decode_json, read_bytes
from ms_parallel.planner.free_memory import release_free_memory, status_bytes

FILE = "microbatch.json"
"""File name in `output_dir`."""
GIB, LIMIT_BYTES = 1 << 30, 1 << 16
MIN_GROWTH = 0.25
"""Minimum fraction of the excess over predictions that is assumed to grow with the rows."""
OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""Torch's message on a CPU, which has no separate error class."""


class StoredMicrobatchSize(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="microbatch.v1"
):
    """Microbatch size of a run, reused when it resumes, so that the order of sums is the same."""

    conditions: dict[str, int | str | None]
    """Everything that the size depends on; if it differs, the size is determined again."""
    rows: int
    """Rows of a microbatch."""
    counted_bytes: int
    """Peak memory in the trial, maximum over ranks."""
    limit_bytes: int


def sizes_of(rows: int, pipeline: int) -> list[int]:
    """Divisors of `rows` in ascending order, with at least two microbatches per pipeline rank."""
    min_microbatches = 1 if pipeline == 1 else 2 * pipeline
    divisors = [size for size in range(1, rows + 1) if rows % size == 0]
    return [size for size in divisors if rows // size >= min_microbatches] or [1]


def largest_predicted(
    sizes: Sequence[int], limit_bytes: int, predict: Callable[[int], int]
) -> tuple[int, int]:
    """Return the largest size whose predicted memory is within the limit, and the prediction.

    Args:
        sizes: microbatch sizes in ascending order.
        limit_bytes: memory limit of a rank.
        predict: predicts the bytes for a size; a binary search calls it.

    Raises:
        ConfigError: not even the smallest size fits.
    """
    low, high = 0, len(sizes) - 1
    needed = predict(sizes[0])
    if needed > limit_bytes:
        raise ConfigError(
            f"microbatch_size='auto' finds no size that fits: {sizes[0]} sample(s) at once are"
            f" predicted to need {needed / GIB:.3f} GiB of a rank's {limit_bytes / GIB:.3f} GiB;"
            " lower sequence_length, recompute more, shard over more ranks, or raise memory_gib"
        )
    # Invariant: sizes[low] fits with `needed` bytes, and nothing above sizes[high] fits.
    while low < high:
        middle = (low + high + 1) // 2
        bytes_needed = predict(sizes[middle])
        if bytes_needed <= limit_bytes:
            low, needed = middle, bytes_needed
        else:
            high = middle - 1
    return sizes[low], needed


def next_trial(
    predicted: Mapping[int, int],
    trials: Mapping[int, int | None],
    limit_bytes: int,
    *,
    single_process: bool = False,
) -> int | None:
    """Choose the next size to try; None if the largest size that fits has been tried.

    The smallest comes first. Its excess over the prediction (memory of temporaries) is assumed to
    grow with the rows, and after the second trial at the observed rate: a rank must not run out of
    memory in a trial, as others wait for its messages.

    Args:
        predicted: predicted bytes of the sizes that are expected to fit.
        trials: measured bytes of the sizes tried so far; None if out of memory.
        limit_bytes: memory limit of a rank.
        single_process: no other rank waits for this one, so at the end the next size that is
            predicted to fit is tried too.
    """
    if not trials:
        return min(predicted)
    fitting = {size: used for size, used in trials.items() if used and used <= limit_bytes}
    if not fitting:
        return None
    best = max(fitting)
    excess, per_row = _excess(predicted, fitting)
    # Smallest size that did not fit.
    too_large = min(trials.keys() - fitting.keys(), default=max(predicted) + 1)
    larger = [
        size
        for size, predicted_bytes in predicted.items()
        if best < size < too_large and predicted_bytes <= limit_bytes
    ]
    # Sizes whose prediction plus extrapolated excess is within the limit.
    within_limit = [
        n for n in larger if predicted[n] + excess + per_row * (n - best) <= limit_bytes
    ]
    return max(within_limit, default=min(larger, default=None) if single_process else None)


def _excess(predicted: Mapping[int, int], fitting: Mapping[int, int]) -> tuple[float, float]:
    """Excess of the largest tried size over its prediction, and the growth per row."""
    *smaller, best = sorted(fitting)
    excess = [max(0, fitting[size] - predicted[size]) for size in (*smaller, best)]
    # Bounds of the growth: proportional to the rows, and MIN_GROWTH of that.
    mean_per_row = excess[-1] / best
    if not smaller:
        return excess[-1], mean_per_row
    slope = (excess[-1] - excess[-2]) / (best - smaller[-1])
    return excess[-1], min(mean_per_row, max(slope, mean_per_row * MIN_GROWTH))


def interpolate(sizes: Sequence[int], first: int, last: int) -> dict[int, int]:
    """Interpolate predictions linearly between the first and the last size."""
    step = (last - first) / max(1, sizes[-1] - sizes[0])
    return {size: first + int(step * (size - sizes[0])) for size in sizes}


def trial_bytes(engine: Any, loss: Loss, rows: int, length: int) -> int | None:
    """Run a step without an update, and return the peak memory over ranks. Collective.

    Args:
        engine: an `Engine` with the microbatch size to try.
        loss: loss of the run.
        rows: rows of a data rank.
        length: tokens per row.

    Returns:
        Peak bytes, maximum over ranks; None if out of memory.

    Raises:
        ConfigError: out of memory with several processes, as the others cannot continue.
    """
    generator = torch.Generator().manual_seed(0)
    size = engine.vocabulary_size or 1
    text = torch.randint(0, size, (rows, length + 1), generator=generator)
    batch = {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}
    microbatches = engine.runner.microbatches(batch)
    weight = engine.reduction.count(microbatches, loss).weight
    peak = _PeakMemory(engine.device)
    try:
        engine.runner.forward_backward(microbatches, loss, weight, engine.reduction)
        counted = peak.grown_bytes()
        if engine.device.type == "cpu":
            counted += allocated_bytes(engine)
    except RuntimeError as error:  # includes torch.OutOfMemoryError
        ran_out = isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY in str(error)
        if not ran_out:
            raise
        if dist.get_world_size() > 1:  # others wait for this rank's messages
            raise ConfigError(
                f"microbatch_size='auto' finds no size that fits: rank {dist.get_rank()} ran out of"
                f" memory with {len(microbatches[0]['tokens'])} sample(s) at once; lower"
                " sequence_length, recompute more, shard over more ranks, or raise its memory"
            ) from error
        return None
    finally:
        engine.trained.zero_grad()
    # All ranks must choose the same size, so the largest peak counts.
    peak_bytes = torch.tensor([counted], device=engine.device)
    return int(engine.groups.all_reduce(peak_bytes, op=dist.ReduceOp.MAX).item())


def allocated_bytes(engine: Any) -> int:
    """Bytes allocated between steps; on a CPU only parameters and optimizer state are counted."""
    if engine.device.type != "cpu":
        return int(torch.accelerator.memory_allocated(engine.device))
    moments = (*engine.optimizer.moments.values(), *engine.optimizer.unsharded.values())
    state = [
        *engine.parameters.values(),
        *(part for moments_of_param in moments for part in moments_of_param.values()),
    ]
    return sum(part.nbytes for part in state)


class _PeakMemory:
    """Measures peak memory from its creation on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(device)
            return
        release_free_memory()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the peak
        self.rss_before = status_bytes("VmRSS")

    def grown_bytes(self) -> int:
        """Peak minus current memory on a CPU; total peak on an accelerator."""
        if self.device.type != "cpu":
            return int(torch.accelerator.max_memory_allocated(self.device))
        return status_bytes("VmHWM") - self.rss_before


def write_microbatch(path: Path, record: StoredMicrobatchSize) -> None:
    """Write a file for `read_microbatch`, atomically.

    Raises:
        CheckpointError: it cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, msgspec.json.encode(record))


def read_microbatch(path: Path) -> StoredMicrobatchSize | None:
    """Read the stored microbatch size of a run; None without a file.

    Raises:
        ConfigError: the file cannot be read or is invalid.
    """
    if not os.path.lexists(path):
        return None
    content = read_bytes(path, error=ConfigError, limit_bytes=LIMIT_BYTES)
    context = f"{path}: not a stored microbatch size"
    try:
        return decode_json(content, StoredMicrobatchSize, where=context, error=ConfigError)
    except ConfigError as error:
        raise ConfigError(f"{error}; restore it, or delete it to search again") from error
