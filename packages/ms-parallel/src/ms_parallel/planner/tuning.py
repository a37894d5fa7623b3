"""Measures a model on its processes, and searches for the schedule and the split of its layers."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ms_parallel.cluster.agreement import run_on_rank_zero
from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.errors import ConfigError, LayoutError
from ms_parallel.models.batch import Batch
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.registry import model_plan
from ms_parallel.pipeline.recorder import Recorder
from ms_parallel.planner.found_schedule import FoundSchedule
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
from ms_parallel.planner.shortest import shortest_schedule
from ms_parallel.schedules.table.action import Kind
from ms_parallel.schedules.table.segments import SegmentCosts

STEPS = 3
"""Steps that are timed, after one that is not."""
MAX = dist.ReduceOp.MAX


def measure_segments(
    config: ModelConfig, groups: Groups, *, rows: int, sequence_length: int, **options: Any
) -> SegmentCosts:
    """Time and memory of one microbatch in each segment; the same on every process.

    Some steps pass through an engine made for it, every segment a stage of its own; weights of a
    run, its random numbers and its place in the data are not touched. All processes call this.

    Args:
        config: the model.
        groups: the layout's processes.
        rows: of a microbatch.
        sequence_length: tokens of a row.
        options: of the engine, such as `recompute` and `mixed_precision`.

    Returns:
        Times in microseconds, of the fastest pipeline rank, and how much slower others are; memory
        in bytes. Of data and tensor ranks the slowest counts.
    """
    layers, ranks = segment_layers(config), groups.layout.pipeline
    batch = random_batch(config.vocab_size, rows, sequence_length)

    def engine_at(shift: int) -> Engine:
        staged = segment_stages(layers, ranks, shift)
        return Engine(config, groups=groups, **{**options, "schedule": staged})

    after = _times(engine_at(1), batch, len(layers)) if ranks > 1 else torch.zeros(3, len(layers))
    engine = engine_at(0)
    own = torch.cat([_times(engine, batch, len(layers)), torch.zeros(2, len(layers))])
    memory = engine.runner.runtime = MemoryRuntime(engine.runner.runtime)
    _step(engine, batch)
    for stage in engine.stages:
        own[3, stage] = memory.kept_bytes[stage]
        own[4, stage] = memory.retained_bytes[stage]
    links = torch.tensor(message_times(groups, memory.message_bytes))
    found = torch.cat([own.flatten(), after.sum(0), links]).to(groups.device)
    most = groups.all_reduce(found, op=MAX).cpu()
    table = most[:-2].view(6, -1)
    here, there = table[:3].sum(0).tolist(), table[5].tolist()
    slowness = rank_slowness(here, there, ranks) if ranks > 1 else ()
    latency_s, transfer_s = most[-2:].tolist()
    return segment_costs(layers, table[:5], latency_s, transfer_s, slowness)


def _times(engine: Engine, batch: Batch, segments: int) -> torch.Tensor:
    """Return the seconds (3, segments) of forwards and both backwards of the segments here."""
    times = [_timed(engine, batch) for _ in range(1 + STEPS)][1:]
    found = torch.zeros(3, segments)
    for index, kind in enumerate((Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)):
        for stage in engine.stages:
            found[index, stage] = median(t for step in times for t in step[kind, stage])
    return found


def _step(engine: Engine, batch: Batch) -> None:
    """Run the passes of one step and drop the gradients; there is no optimizer."""
    loss, rows = NextTokenLoss(), len(batch["tokens"]) // MICROBATCHES
    microbatches = engine.runner.microbatches(batch, rows)
    weight = engine.reduction.count(microbatches, loss).weight
    engine.runner.forward_backward(microbatches, loss, weight, engine.reduction)
    for parameter in engine.parameters.values():
        parameter.grad = None


def _timed(engine: Engine, batch: Batch) -> dict[tuple[Kind, int], list[float]]:
    """Time each computation of a step, in seconds by kind and stage."""
    recorder = engine.runner.runtime.recorder = Recorder(engine.device)
    _step(engine, batch)
    engine.runner.runtime.recorder = None
    found: dict[tuple[Kind, int], list[float]] = {}
    row = engine.tables.training(MICROBATCHES).computations()[engine.groups.place.pipeline]
    for action, (begin, end) in zip(row, recorder.times_ns(), strict=True):
        found.setdefault((action.kind, action.stage), []).append((end - begin) / 1e9)
    return found


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
) -> FoundSchedule:
    """Measure this model on these processes, and search; the same result on every process.

    All processes call this before they build their engine with `schedule=found.staged`. Stages one
    a rank, in a V and in a loop of two are tried, each with the layers shared out to suit it. Pairs
    of a forward and a backward are not tried, as the runtime does not overlap them.

    Args:
        config: the model.
        groups: the layout's processes.
        rows: that a data rank passes to one update.
        sequence_length: tokens of a row.
        microbatch_size: rows that pass at once; None for all of them.
        memory_cap_bytes: most activation memory of a rank, or of each; None for what 1F1B takes.
        measure: what gives the costs of the segments.
        options: of the engine that will perform it, such as `recompute` and `mixed_precision`.

    Raises:
        ConfigError: the rows do not divide into microbatches; only those of one size are searched.
        LayoutError: the model has fewer layers than the pipeline has ranks.
        ScheduleError: the cap is below the least that works, which is named.
    """
    size = microbatch_size or rows
    if rows % size:
        raise ConfigError(
            f"{rows} rows of a data rank do not divide into microbatches of {size}; a schedule is"
            " searched for microbatches of one size, so choose a divisor"
        )
    conditions = conditions_of(
        config, groups, rows, sequence_length, size, memory_cap_bytes, options
    )
    segments, ranks = len(model_plan(config).cuts), groups.layout.pipeline
    if segments < ranks:
        raise LayoutError(f"{segments} layers for pipeline={ranks}; use at most {segments} ranks")
    costs = measure(config, groups, rows=size, sequence_length=sequence_length, **options)
    # What is computed again would be kept from I to W, more than recomputation spares.
    whole = conditions["recompute"] != "none"

    def encoded() -> bytes:
        found = shortest_schedule(
            costs,
            ranks,
            rows // size,
            memory_cap_bytes,
            conditions=conditions,
            split=not whole,
        )
        return msgspec.json.encode(found)

    return msgspec.json.decode(run_on_rank_zero(encoded), type=FoundSchedule)


def conditions_of(
    config: ModelConfig,
    groups: Groups,
    rows: int,
    sequence_length: int,
    microbatch_size: int,
    memory_cap_bytes: int | Sequence[int] | None,
    options: dict[str, Any],
) -> dict[str, int | str | None]:
    """Return what a found schedule depends on, as it stands in its file."""
    precision = options.get("mixed_precision", False)
    caps = memory_cap_bytes
    cap = str(list(caps)) if isinstance(caps, Sequence) else caps
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
