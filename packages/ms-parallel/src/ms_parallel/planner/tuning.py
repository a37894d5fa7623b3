"""Measures a model on its processes, and searches for the best schedule and layer split."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ms_parallel.arguments import check_callable, check_integer, check_type
from ms_parallel.cluster.agreement import run_on_rank_zero
from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.errors import ConfigError, LayoutError
from ms_parallel.models.batch import Batch
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.registry import model_plan
from ms_parallel.pipeline.recorder import ComputationRecorder
from ms_parallel.planner.probes import (
    MICROBATCHES,
    MemoryRuntime,
    message_times,
    random_batch,
    rank_slowness,
    segment_costs,
    segment_layers,
    segment_stages,
)
from ms_parallel.planner.searched_schedule import SearchedSchedule
from ms_parallel.planner.shortest import shortest_schedule
from ms_parallel.schedules.table.action import Kind
from ms_parallel.schedules.table.segments import SegmentCosts

STEPS = 3
"""Timed steps, after one untimed step."""
MAX = dist.ReduceOp.MAX


def measure_segments(
    config: ModelConfig, groups: Groups, *, rows: int, sequence_length: int, **options: Any
) -> SegmentCosts:
    """Measure the time and memory of a microbatch in each segment. Collective.

    A few steps run on a separate engine with one stage per segment. The run's weights, random
    generators and data position do not change.

    Args:
        config: configuration of the model.
        groups: process groups of the layout.
        rows: microbatch size in rows.
        sequence_length: tokens per row.
        options: options of the engine, such as `recompute` and `mixed_precision`.

    Returns:
        Times in microseconds on the fastest pipeline rank, the slowness of the other ranks, and
        memory in bytes; the same on all processes. Of data and tensor ranks the slowest counts.
    """
    layers, ranks = segment_layers(config), groups.layout.pipeline
    batch = random_batch(config.vocab_size, rows, sequence_length)

    def engine_at(shift: int) -> Engine:
        staged = segment_stages(layers, ranks, shift)
        return Engine(config, groups=groups, **{**options, "schedule": staged})

    # Segments on the next rank, to compare the speed of ranks.
    shifted = torch.zeros(3, len(layers))
    if ranks > 1:
        shifted = _times(engine_at(1), batch, len(layers))
    engine = engine_at(0)
    # (5, segments): forward, input backward, weight backward; bytes kept and retained. Entries of
    # segments on other ranks are 0, so the maximum over ranks fills them in.
    local = torch.cat([_times(engine, batch, len(layers)), torch.zeros(2, len(layers))])
    memory = engine.runner.runtime = MemoryRuntime(engine.runner.runtime)
    _step(engine, batch)
    for stage in engine.stages:
        local[3, stage] = memory.kept_bytes[stage]
        local[4, stage] = memory.retained_bytes[stage]
    links = torch.tensor(message_times(groups, memory.message_bytes))
    measured = torch.cat([local.flatten(), shifted.sum(0), links]).to(groups.device)
    slowest = groups.all_reduce(measured, op=MAX).cpu()
    table = slowest[:-2].view(6, -1)  # the last row has the times on the next rank
    times, next_times = table[:3].sum(0).tolist(), table[5].tolist()
    slowness = rank_slowness(times, next_times, ranks) if ranks > 1 else ()
    latency_s, transfer_s = slowest[-2:].tolist()
    return segment_costs(layers, table[:5], latency_s, transfer_s, slowness)


def _times(engine: Engine, batch: Batch, segments: int) -> torch.Tensor:
    """Median seconds (3, segments) of forward, input and weight backward; 0 on other ranks."""
    steps = [_timed(engine, batch) for _ in range(1 + STEPS)][1:]
    times = torch.zeros(3, segments)
    for index, kind in enumerate((Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)):
        for stage in engine.stages:
            times[index, stage] = median(t for step in steps for t in step[kind, stage])
    return times


def _step(engine: Engine, batch: Batch) -> None:
    """Run forward and backward of one step, and drop the gradients."""
    loss, rows = NextTokenLoss(), len(batch["tokens"]) // MICROBATCHES
    microbatches = engine.runner.microbatches(batch, rows)
    weight = engine.reduction.count(microbatches, loss).weight
    engine.runner.forward_backward(microbatches, loss, weight, engine.reduction)
    for parameter in engine.parameters.values():
        parameter.grad = None


def _timed(engine: Engine, batch: Batch) -> dict[tuple[Kind, int], list[float]]:
    """Run a step; return the seconds of its computations by kind and stage."""
    recorder = engine.runner.runtime.recorder = ComputationRecorder(engine.device)
    _step(engine, batch)
    engine.runner.runtime.recorder = None
    seconds: dict[tuple[Kind, int], list[float]] = {}
    row = engine.tables.training(MICROBATCHES).computations()[engine.groups.place.pipeline]
    for action, (start, end) in zip(row, recorder.times_ns(), strict=True):
        seconds.setdefault((action.kind, action.stage), []).append((end - start) / 1e9)
    return seconds


def search_schedule(
    config: ModelConfig,
    groups: Groups,
    *,
    rows: int,
    sequence_length: int,
    microbatch_size: int | None = None,
    memory_cap_bytes: int | Sequence[int] | None = None,
    measure: Callable[..., SegmentCosts] = measure_segments,
    **options: Any,
) -> SearchedSchedule:
    """Measure the model on these processes and search for the best schedule. Collective.

    The result is the same on all processes; pass its `staged` as the `schedule` of the engine. The
    search covers one stage per rank, a V placement and a loop of two stages per rank, each with its
    own layer split. Schedules that overlap a forward and a backward are not searched, as the
    runtime does not overlap them.

    Args:
        config: configuration of the model.
        groups: process groups of the layout.
        rows: rows per step on a data rank.
        sequence_length: tokens per row.
        microbatch_size: microbatch size in rows; None for all rows.
        memory_cap_bytes: limit on the activations of every rank, or one limit per rank; None for
            the memory that 1F1B needs.
        measure: function that measures the costs of the segments.
        options: options of the engine, such as `recompute` and `mixed_precision`.

    Raises:
        ConfigError: `microbatch_size` does not divide the rows.
        LayoutError: the model has fewer layers than the pipeline has ranks.
        ScheduleError: the memory cap is too low for any schedule; the message has the minimum.
    """
    check_integer("rows", rows, minimum=1, error=ConfigError)
    check_integer("sequence_length", sequence_length, minimum=1, error=ConfigError)
    check_integer("microbatch_size", microbatch_size, minimum=1, error=ConfigError, optional=True)
    check_type("groups", groups, Groups, "Groups", error=ConfigError)
    check_callable("measure", measure, error=ConfigError)
    size = microbatch_size or rows
    if rows % size:
        raise ConfigError(
            f"microbatch_size={size} must divide the {rows} rows of a data rank, because the search"
            " needs microbatches of equal size; use a divisor"
        )
    conditions = conditions_of(
        config, groups, rows, sequence_length, size, memory_cap_bytes, options
    )
    segments, ranks = len(model_plan(config).cuts), groups.layout.pipeline
    if segments < ranks:
        raise LayoutError(f"{segments} layers for pipeline={ranks}; use at most {segments} ranks")
    costs = measure(config, groups, rows=size, sequence_length=sequence_length, **options)
    # With a split backward, recomputed activations stay live from input to weight backward, which
    # takes more memory than recomputation saves.
    split = conditions["recompute"] == "none"

    # The search runs on rank 0 only, as all ranks need the same schedule.
    def encoded() -> bytes:
        schedule = shortest_schedule(
            costs,
            ranks,
            rows // size,
            memory_cap_bytes,
            conditions=conditions,
            split=split,
        )
        return msgspec.json.encode(schedule)

    return msgspec.json.decode(run_on_rank_zero(encoded), type=SearchedSchedule)


def conditions_of(
    config: ModelConfig,
    groups: Groups,
    rows: int,
    sequence_length: int,
    microbatch_size: int,
    memory_cap_bytes: int | Sequence[int] | None,
    options: dict[str, Any],
) -> dict[str, int | str | None]:
    """Everything that a searched schedule depends on, as stored in its file."""
    precision = options.get("mixed_precision", False)
    limits = memory_cap_bytes
    cap = str(list(limits)) if isinstance(limits, Sequence) else limits
    return {
        "layout": str(groups.layout),
        "architecture": config.model_type,
        "layers": config.num_hidden_layers,
        "rows": rows,
        "microbatch_size": microbatch_size,
        "sequence_length": sequence_length,
        "memory_cap_bytes": cap,
        "recompute": str(options.get("recompute", "none")),
        "mixed_precision": precision if isinstance(precision, str) else int(precision),
    }
