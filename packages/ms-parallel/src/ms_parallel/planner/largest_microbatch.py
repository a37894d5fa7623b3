"""Finds the largest microbatch that fits into memory: by prediction, and then by a trial."""

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
from ms_parallel.planner.free_memory import give_back, status_bytes

FILE = "microbatch.json"
"""Its name in `output_dir`."""
GIB, LIMIT_BYTES = 1 << 30, 1 << 16
LEAST_GROWTH = 0.25
"""Least share of what is above predictions that grows with the rows."""
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""What torch says on a CPU, without a class of its own."""


class FoundMicrobatch(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="microbatch.v1"
):
    """What was found for a run, which goes on with it: its sums keep their order."""

    conditions: dict[str, int | str | None]
    """What it was found for; where any of it differs, it is found anew."""
    rows: int
    """Rows of a microbatch."""
    counted_bytes: int
    """What the rank that holds most held in the trial."""
    limit_bytes: int


def sizes_of(rows: int, pipeline: int) -> list[int]:
    """List the divisors of `rows`, ascending, that leave a pipeline two microbatches a rank."""
    least = 1 if pipeline == 1 else 2 * pipeline
    divisors = [size for size in range(1, rows + 1) if rows % size == 0]
    return [size for size in divisors if rows // size >= least] or [1]


def largest_predicted(
    sizes: Sequence[int], limit_bytes: int, predict: Callable[[int], int]
) -> tuple[int, int]:
    """Find the largest of `sizes` whose prediction is within the limit, and the prediction.

    Args:
        sizes: ascending.
        limit_bytes: most that a rank may hold.
        predict: bytes for a size; asked for few of them.

    Raises:
        ConfigError: not even the smallest fits.
    """
    low, high = 0, len(sizes) - 1
    needed = predict(sizes[0])
    if needed > limit_bytes:
        raise ConfigError(
            f"microbatch_size='auto' finds none: {sizes[0]} sample(s) at once are predicted to need"
            f" {needed / GIB:.3f} GiB of a rank's {limit_bytes / GIB:.3f} GiB; lower"
            " sequence_length, recompute more, shard over more ranks, or raise memory_gib"
        )
    while low < high:
        middle = (low + high + 1) // 2
        asked = predict(sizes[middle])
        if asked <= limit_bytes:
            low, needed = middle, asked
        else:
            high = middle - 1
    return sizes[low], needed


def next_trial(
    predicted: Mapping[int, int],
    tried: Mapping[int, int | None],
    limit_bytes: int,
    *,
    alone: bool = False,
) -> int | None:
    """Choose the size to try next; None when the largest that fits has been tried.

    The smallest comes first. What it took above its prediction, which lives for the length of one
    operator, is taken to grow with the rows, and from the second trial on as it grew between both:
    a rank must not run out of memory in a trial, as others wait for what it was about to send.

    Args:
        predicted: bytes of each size that is predicted to fit.
        tried: bytes that each size took so far, None where memory ran out.
        limit_bytes: most that a rank may hold.
        alone: whether no rank waits for this one: when nothing else is left, the next size that is
            predicted to fit is tried too.
    """
    if not tried:
        return min(predicted)
    fitting = {size: took for size, took in tried.items() if took and took <= limit_bytes}
    if not fitting:
        return None
    best = max(fitting)
    above, each = _above(predicted, fitting)
    too_large = min(tried.keys() - fitting.keys(), default=max(predicted) + 1)
    larger = [
        size for size, need in predicted.items() if best < size < too_large and need <= limit_bytes
    ]
    left = [n for n in larger if predicted[n] + above + each * (n - best) <= limit_bytes]
    return max(left, default=min(larger, default=None) if alone else None)


def _above(predicted: Mapping[int, int], fitting: Mapping[int, int]) -> tuple[float, float]:
    """Return what the largest tried size took above its prediction, and its growth for a row."""
    *fewer, best = sorted(fitting)
    above = [max(0, fitting[size] - predicted[size]) for size in (*fewer, best)]
    whole = above[-1] / best
    if not fewer:
        return above[-1], whole
    grown = (above[-1] - above[-2]) / (best - fewer[-1])
    return above[-1], min(whole, max(grown, whole * LEAST_GROWTH))


def between(sizes: Sequence[int], first: int, last: int) -> dict[int, int]:
    """Predict all sizes on the line between the first's prediction and the last's."""
    step = (last - first) / max(1, sizes[-1] - sizes[0])
    return {size: first + int(step * (size - sizes[0])) for size in sizes}


def trial_bytes(engine: Any, loss: Loss, rows: int, length: int) -> int | None:
    """Run an update's forwards and backwards, and measure the most a rank holds; weights stay.

    All processes call this, and agree.

    Args:
        engine: an `Engine`, with the microbatch size that is tried.
        loss: of the run.
        rows: of a data rank.
        length: tokens of a row.

    Returns:
        Of the rank that holds most; None if memory ran out.

    Raises:
        ConfigError: memory ran out, and there are other processes, which cannot go on.
    """
    generator = torch.Generator().manual_seed(0)
    size = engine.vocabulary_size or 1
    text = torch.randint(0, size, (rows, length + 1), generator=generator)
    batch = {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}
    microbatches = engine.runner.microbatches(batch)
    weight = engine.reduction.count(microbatches, loss).weight
    peak = _Peak(engine.device)
    try:
        engine.runner.forward_backward(microbatches, loss, weight, engine.reduction)
        counted = peak.grown_bytes()
        if engine.device.type == "cpu":
            counted += held_bytes(engine)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        ran_out = isinstance(error, torch.OutOfMemoryError) or NO_MEMORY in str(error)
        if not ran_out:
            raise
        if dist.get_world_size() > 1:  # others wait for what this rank was about to send
            raise ConfigError(
                f"microbatch_size='auto' finds none: rank {dist.get_rank()} ran out of memory when"
                f" it tried {len(microbatches[0]['tokens'])} sample(s) at once; lower"
                " sequence_length, recompute more, shard over more ranks, or give it more memory"
            ) from error
        return None
    finally:
        engine.trained.zero_grad()
    most = torch.tensor([counted], device=engine.device)
    return int(engine.groups.all_reduce(most, op=dist.ReduceOp.MAX).item())


def held_bytes(engine: Any) -> int:
    """Count the bytes held between updates: all that is allocated, or on a CPU what is known of."""
    if engine.device.type != "cpu":
        return int(torch.accelerator.memory_allocated(engine.device))
    moments = (*engine.optimizer.moments.values(), *engine.optimizer.unsharded.values())
    state = [*engine.parameters.values(), *(part for each in moments for part in each.values())]
    return sum(part.nbytes for part in state)


class _Peak:
    """The most memory that is held from now on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(device)
            return
        give_back()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is now
        self.before = status_bytes("VmRSS")

    def grown_bytes(self) -> int:
        """Return on a CPU what has come on top since then, and on an accelerator all."""
        if self.device.type != "cpu":
            return int(torch.accelerator.max_memory_allocated(self.device))
        return status_bytes("VmHWM") - self.before


def write_microbatch(path: Path, found: FoundMicrobatch) -> None:
    """Write a file that `read_microbatch` reads, whole or not at all.

    Raises:
        CheckpointError: it cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, msgspec.json.encode(found))


def read_microbatch(path: Path) -> FoundMicrobatch | None:
    """Read the microbatch size that was found for a run; None if there is no file.

    Raises:
        ConfigError: it cannot be read, or is not one.
    """
    if not os.path.lexists(path):
        return None
    content = read_bytes(path, error=ConfigError, limit_bytes=LIMIT_BYTES)
    where = f"{path}: not a found microbatch"
    try:
        return decode_json(content, FoundMicrobatch, where=where, error=ConfigError)
    except ConfigError as error:
        raise ConfigError(f"{error}; restore it, or delete it to find one again") from error
