"""Resolves `microbatch_size = "auto"` to the largest size that fits, by prediction and trials."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch.distributed as dist
from attrs import evolve

from ms_parallel.cluster.agreement import run_on_rank_zero, sums
from ms_parallel.cluster.device import pick_device
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.errors import ConfigError
from ms_parallel.planner.free_memory import (
    free_bytes,
    map_blocks,
    release_free_memory,
    shrink_stacks,
    ulimit_headroom,
)
from ms_parallel.planner.largest_microbatch import (
    FILE,
    GIB,
    StoredMicrobatchSize,
    allocated_bytes,
    interpolate,
    largest_predicted,
    next_trial,
    read_microbatch,
    sizes_of,
    trial_bytes,
    write_microbatch,
)
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.training.options import AUTO, Options


def limit_bytes(options: Options, allocated_bytes: int = 0) -> int:
    """Memory limit of this rank: `memory_gib`, or allocated plus free bytes of the device."""
    if options.memory_gib is not None:
        return int(options.memory_gib * GIB)
    return allocated_bytes + free_bytes(pick_device(options.wanted_device))


def _reduce_overhead(options: Options) -> None:
    """On CPU ranks with a memory limit, reduce memory other than tensors.

    All ranks do so if any is limited, since the largest rank is compared with the lowest limit.
    """
    on_cpu = pick_device(options.wanted_device).type == "cpu"
    (limited,) = sums(on_cpu and ulimit_headroom() < inf)
    if on_cpu and (limited or options.memory_gib is not None):
        map_blocks()
    if on_cpu and limited:
        shrink_stacks()


def predict_microbatch_size(
    options: Options, layout: Layout, predict: Callable[[int], Sequence[RankMemory]]
) -> Options:
    """Replace the microbatch size `auto` with a stored or a predicted number.

    All processes call this before they build anything; on ranks with a memory limit it also
    reduces the allocator's overhead.

    Args:
        options: options of the run.
        layout: its layout.
        predict: memory of each pipeline rank for a microbatch size in rows.

    Raises:
        ConfigError: no size fits, or the stored size cannot be read.
    """
    _reduce_overhead(options)
    if options.microbatch_size != AUTO:
        return options
    stored = run_on_rank_zero(lambda: _stored(options, layout))
    if stored is not None:
        return evolve(options, microbatch_size=stored.rows)
    limit = _min_over_ranks(limit_bytes(options))
    sizes = sizes_of(options.batch_size // layout.data_ranks, layout.pipeline)

    def largest() -> int:
        return largest_predicted(sizes, limit, lambda rows: max(r.total for r in predict(rows)))[0]

    size = run_on_rank_zero(largest)
    return evolve(options, microbatch_size=size)


def resolve_microbatch_size(
    engine: Any, options: Options, layout: Layout, predict: Callable[[int], Sequence[RankMemory]]
) -> StoredMicrobatchSize | None:
    """Try sizes up to the predicted one, and store and return the largest that fits.

    All processes call this. Returns None if the size was already known.

    Args:
        engine: an `Engine` with the predicted size; its microbatch size is changed.
        options: options of the run, with `auto`.
        layout: its layout.
        predict: as in `predict_microbatch_size`.

    Raises:
        ConfigError: not even the smallest size fits.
    """
    if options.microbatch_size != AUTO or run_on_rank_zero(lambda: _stored(options, layout)):
        return None
    rows = options.batch_size // layout.data_ranks
    largest = engine.runner.microbatch_size or rows
    sizes = [size for size in sizes_of(rows, layout.pipeline) if size <= largest]
    # Two predictions suffice: memory is interpolated between the smallest and the largest size.
    predicted = run_on_rank_zero(
        lambda: interpolate(
            sizes, *(max(r.total for r in predict(size)) for size in (sizes[0], sizes[-1]))
        )
    )
    loss = NextTokenLoss(
        mtp_weight=options.mtp_weight, z_loss_coefficient=options.z_loss_coefficient
    )
    engine.runner.microbatch_size = sizes[0]
    trial_bytes(engine, loss, rows, options.sequence_length)  # one-time allocations
    release_free_memory()
    limit = _min_over_ranks(limit_bytes(options, allocated_bytes(engine)))
    trials: dict[int, int | None] = {}  # rows -> peak bytes, None if out of memory
    single_process = layout.world_size == 1
    while (size := next_trial(predicted, trials, limit, single_process=single_process)) is not None:
        engine.runner.microbatch_size = size
        trials[size] = trial_bytes(engine, loss, rows, options.sequence_length)
        release_free_memory()  # after an out-of-memory error its frames still hold tensors
    fitting = {size: peak for size, peak in trials.items() if peak and peak <= limit}
    if not fitting:
        raise ConfigError(
            f"microbatch_size='auto' finds no size that fits: {sizes[0]} sample(s) at once took"
            f" {(trials[sizes[0]] or limit) / GIB:.3f} GiB of a rank's {limit / GIB:.3f} GiB; lower"
            " sequence_length, recompute more, shard over more ranks, or raise memory_gib"
        )
    engine.runner.microbatch_size = max(fitting)
    return _store(options, layout, max(fitting), fitting[max(fitting)], limit)


def _store(
    options: Options, layout: Layout, size: int, counted_bytes: int, limit_bytes: int
) -> StoredMicrobatchSize:
    record = StoredMicrobatchSize(
        conditions=_conditions(options, layout),
        rows=size,
        counted_bytes=counted_bytes,
        limit_bytes=limit_bytes,
    )
    run_on_rank_zero(lambda: write_microbatch(options.output_dir / FILE, record))
    return record


def _stored(options: Options, layout: Layout) -> StoredMicrobatchSize | None:
    stored = read_microbatch(options.output_dir / FILE)
    return stored if stored and stored.conditions == _conditions(options, layout) else None


def _conditions(options: Options, layout: Layout) -> dict[str, int | str | None]:
    return {
        "layout": str(layout),
        "batch_size": options.batch_size,
        "sequence_length": options.sequence_length,
        "recompute": str(options.recompute),
        "mixed_precision": str(options.mixed_precision),
        "sharding": options.sharding,
        "schedule": str(options.schedule),
        "memory_gib": str(options.memory_gib),
    }


def _min_over_ranks(limit: int) -> int:
    """Return the minimum of the limits of all processes."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return limit
    gathered: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(gathered, limit)
    return min(gathered)
