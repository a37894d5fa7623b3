"""Measures what a model's layers and its messages cost on these processes, before a run begins.

A few steps of made-up tokens pass through an engine of its own, every layer a stage for itself, as
the layout splits and shards it. That engine is then dropped: no weight of the run, no generator of
chance and no place in the data has been touched.
"""

from collections.abc import Sequence
from math import prod
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import Batch, NextTokenLoss
from ms_parallel.engine.microbatches import cut_batch, measure
from ms_parallel.models import ModelConfig, model_plan
from ms_parallel.pipeline.choice import Staged
from ms_parallel.pipeline.recorder import Recorder
from ms_parallel.pipeline.runtime import Key, Runtime, Step
from ms_parallel.schedules.solver.balance import LayerCosts
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.split.part import local_part

__all__ = ["measure_layers"]

MICROBATCHES = 3
"""Of one step: the first gathers sharded weights and the last sums gradients, so one has neither
and the median counts it."""
STEPS = 3
"""That are timed, after one that is not."""
ECHOES = 10
"""Messages there and back, of each size."""
ALIKE = 0.05
"""Layers that differ by no more than this share of their median count as equal."""
PER_SECOND = 1_000_000
"""Costs are whole microseconds: a schedule of the same costs is the same on every process."""


def measure_layers(
    config: ModelConfig, groups: Groups, *, rows: int, sequence_length: int, **options: Any
) -> LayerCosts:
    """Time and memory of one microbatch in each layer between two cuts; the same on every process.

    The embedding counts with the first layer and the head with the last. All processes call this.

    Args:
        config: the model.
        groups: the layout's processes.
        rows: of a microbatch.
        sequence_length: tokens of a row.
        options: of the engine, such as `recompute` and `mixed_precision`.

    Returns:
        Times in microseconds, memory in bytes; the slowest data and tensor rank counts.
    """
    units = _units(config)
    table = _one_stage_a_unit(len(units), groups.layout.pipeline)
    staged = Staged(schedule=table, layers=units)
    options.pop("schedule", None)
    engine = Engine(config, groups=groups, **{**options, "schedule": staged})
    batch = _made_up(config.vocab_size, rows, sequence_length)
    times = [_timed(engine, batch) for _ in range(1 + STEPS)][1:]
    own = torch.zeros(5, len(units))
    for index, kind in enumerate((Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)):
        for stage in engine.stages:
            own[index, stage] = median(t for step in times for t in step[kind, stage])
    scales = engine.runtime = _Scales(engine)
    _perform(engine, batch)
    for stage in engine.stages:
        own[3, stage] = scales.kept_bytes[stage]
        own[4, stage] = scales.retained_bytes[stage]
    size = max((_message_bytes(facts) for facts in scales.mailbox.shapes.values()), default=8)
    links = torch.tensor(_message_times(groups, size))
    most = groups.all_reduce(torch.cat([own.flatten(), links]).to(groups.device), op=MAX).cpu()
    return _costs(most[:-2].view(5, -1), *most[-2:].tolist())


def _message_bytes(facts: tuple[torch.dtype, tuple[int, ...]]) -> int:
    dtype, shape = facts
    return dtype.itemsize * prod(shape)


MAX = dist.ReduceOp.MAX


def _units(config: ModelConfig) -> tuple[int, ...]:
    """Layers between each cut and the next."""
    cuts = model_plan(config).cuts
    ends = [*cuts[1:], config.num_hidden_layers]
    return tuple(end - begin for begin, end in zip(cuts, ends, strict=True))


def _one_stage_a_unit(units: int, ranks: int) -> Schedule:
    """All forwards, then backwards in two parts; each rank has neighbouring stages."""
    placement = [unit * ranks // units for unit in range(units)]
    rows = []
    for rank in range(ranks):
        mine = [stage for stage, home in enumerate(placement) if home == rank]
        rows.append(
            [Action(Kind.FORWARD, s, number) for number in range(MICROBATCHES) for s in mine]
            + [
                Action(kind, stage, number)
                for number in range(MICROBATCHES)
                for stage in reversed(mine)
                for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
            ]
        )
    return Schedule.from_computations(rows, placement, MICROBATCHES, "measurement")


def _made_up(vocabulary: int, rows: int, length: int) -> dict[str, Tensor]:
    """Tokens of a generator of its own."""
    generator = torch.Generator().manual_seed(0)
    size = (MICROBATCHES * rows, length + 1)
    text = torch.randint(0, vocabulary, size, generator=generator)
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def _perform(engine: Engine, batch: Batch) -> None:
    """One step without an optimizer; gradients are dropped."""
    loss, rows = NextTokenLoss(), len(batch["tokens"]) // MICROBATCHES
    microbatches = cut_batch(batch, rows, engine.groups.layout.tensor)
    weight, _ = measure(microbatches, loss, engine.groups)
    engine.backward(microbatches, loss, weight)
    for parameter in engine.parameters.values():
        parameter.grad = None


def _timed(engine: Engine, batch: Batch) -> dict[tuple[Kind, int], list[float]]:
    """Seconds of each computation, by kind and stage."""
    recorder = engine.runtime.recorder = Recorder(engine.device)
    _perform(engine, batch)
    engine.runtime.recorder = None
    found: dict[tuple[Kind, int], list[float]] = {}
    row = engine.tables.training(MICROBATCHES).computations()[engine.groups.place.pipeline]
    for action, (begin, end) in zip(row, recorder.times_ns(), strict=True):
        found.setdefault((action.kind, action.stage), []).append((end - begin) / 1e9)
    return found


class _Scales(Runtime):
    """A runtime that adds up what each stage keeps of its last microbatch, weights apart."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.stages, engine.groups)
        self.mailbox = engine.runtime.mailbox
        self.kept_bytes: dict[int, int] = {}
        """From the forward to the backward of inputs."""
        self.retained_bytes: dict[int, int] = {}
        """From there to the backward of weights; at most as much, as `Costs` has it."""

    def _compute(self, key: Key, entering: Tensor, step: Step, schedule: Schedule) -> Tensor:
        kept = {_place(entering): _size(entering)}

        def keep(saved: Tensor) -> Tensor:
            kept[_place(saved)] = _size(saved)
            return saved.detach()  # the tensor itself could keep its own graph alive

        with saved_tensors_hooks(keep, _itself):
            made = super()._compute(key, entering, step, schedule)
        for weight in self.stages[key[0]].parameters():
            kept.pop(_place(weight), None)
        self.kept_bytes[key[0]] = sum(kept.values())
        return made

    def _backward(self, key: Key, step: Step, schedule: Schedule) -> None:
        super()._backward(key, step, schedule)
        factors = [part for _, *parts in step.later[key].factors for part in parts]
        size = sum({_place(part): _size(part) for part in factors}.values())
        self.retained_bytes[key[0]] = min(size, self.kept_bytes[key[0]])


def _itself(saved: Tensor) -> Tensor:
    return saved


def _place(tensor: Tensor) -> int:
    return _memory(tensor).data_ptr()


def _size(tensor: Tensor) -> int:
    return _memory(tensor).nbytes()


def _memory(tensor: Tensor) -> torch.UntypedStorage:
    part = local_part(tensor)
    # What a collective may still be writing is a wrapper without memory of its own.
    if isinstance(part, AsyncCollectiveTensor):
        part = part.elem
    return part.untyped_storage()


def _message_times(groups: Groups, size_bytes: int) -> tuple[float, float]:
    """Seconds that a small message takes one way, and that one of this size takes beyond it."""
    small, whole = (_echo(groups, size) for size in (8, max(8, size_bytes)))
    return small, max(0.0, whole - small)


def _echo(groups: Groups, size_bytes: int) -> float:
    """Median seconds one way between this rank and its neighbours, the slower of the two."""
    here, last = groups.place.pipeline, groups.layout.pipeline - 1
    box = torch.zeros(size_bytes, dtype=torch.uint8, device=groups.device)
    group, slowest = groups.group("pipeline"), 0.0
    for first in range(last):
        if here not in (first, first + 1):
            continue
        peer = groups.peer("pipeline", 2 * first + 1 - here)
        trips = []
        for _ in range(ECHOES):
            began = perf_counter()
            for sends in (here == first, here != first):
                (dist.send if sends else dist.recv)(box, peer, group=group)
            if groups.device.type != "cpu":
                torch.accelerator.synchronize()
            trips.append(perf_counter() - began)
        slowest = max(slowest, median(trips) / 2)
    return slowest


def _costs(table: Tensor, latency_s: float, transfer_s: float) -> LayerCosts:
    """Whole microseconds and bytes; layers that hardly differ are made alike."""
    forward, inputs, weights, kept, retained = table.tolist()
    return LayerCosts(
        forward=_alike(forward),
        backward_input=_alike(inputs),
        backward_weight=_alike(weights),
        activation=[round(size) for size in kept],
        retained=[round(size) for size in retained],
        latency=round(latency_s * PER_SECOND),
        transfer=round(transfer_s * PER_SECOND),
    )


def _alike(seconds: Sequence[float]) -> list[int]:
    middle = median(seconds)
    near = [middle if abs(time - middle) <= ALIKE * middle else time for time in seconds]
    return [max(1, round(time * PER_SECOND)) for time in near]
