"""Probes of a model's segments: the schedule to run them, their memory, and message times.

A segment is the part of a model between two consecutive points at which it can be cut into stages.
"""

from collections.abc import Sequence
from math import prod
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ms_parallel.cluster.groups import Groups
from ms_parallel.memory.recompute import recomputed_blocks
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.registry import model_plan
from ms_parallel.pipeline.layer_split import StagedSchedule
from ms_parallel.pipeline.runtime import Key, Runtime, Step
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.placements import stages_by_rank
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.schedules.table.segments import SegmentCosts
from ms_parallel.split.part import local_part
from ms_parallel.torch_private import AsyncCollectiveTensor

MICROBATCHES = 3
"""Microbatches per step. The first gathers sharded weights and the last reduces gradients, so the
median is the time without either."""
ROUND_TRIPS = 10
"""Round trips per message size."""
EQUAL_TOLERANCE = 0.05
"""Relative difference from the median below which segments count as equal."""
MAX_SLOWNESS = 1.2
"""Ratio of the slowest to the fastest rank up to which ranks count as equal."""
PER_SECOND = 1_000_000
"""Costs are integers in microseconds, so that all processes find the same schedule."""


def segment_layers(config: ModelConfig) -> tuple[int, ...]:
    """Number of layers of each segment."""
    cuts = model_plan(config).cuts
    ends = [*cuts[1:], config.num_hidden_layers]
    return tuple(end - start for start, end in zip(cuts, ends, strict=True))


def segment_stages(layers: Sequence[int], ranks: int, shift: int = 0) -> StagedSchedule:
    """Build a schedule with one stage per segment: all forwards, then split backwards.

    Args:
        layers: layers of each segment.
        ranks: pipeline ranks, which have consecutive segments.
        shift: give each rank the segments of the rank this many places before it.
    """
    # Consecutive segments per rank, as evenly as possible.
    placement = [(segment * ranks // len(layers) + shift) % ranks for segment in range(len(layers))]
    rows = [
        [Action(Kind.FORWARD, s, number) for number in range(MICROBATCHES) for s in rank_stages]
        + [
            Action(kind, stage, number)
            for number in range(MICROBATCHES)
            for stage in reversed(rank_stages)
            for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        ]
        for rank_stages in stages_by_rank(tuple(placement))
    ]
    schedule = Schedule.from_computations(rows, placement, MICROBATCHES, "measurement")
    return StagedSchedule(schedule=schedule, layers=tuple(layers))


def random_batch(vocabulary: int, rows: int, length: int) -> dict[str, Tensor]:
    """Random tokens and targets (MICROBATCHES * rows, length), independent of the global seed."""
    generator = torch.Generator().manual_seed(0)
    size = (MICROBATCHES * rows, length + 1)
    text = torch.randint(0, vocabulary, size, generator=generator)
    # Targets are the tokens shifted by one position.
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


class MemoryRuntime(Runtime):
    """Runtime that counts the bytes each stage saves for its last microbatch, without weights."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime.stages, runtime.groups, runtime.calls, runtime.sharding)
        self.mailbox = runtime.mailbox
        self.kept_bytes: dict[int, int] = {}
        """Bytes saved by stage, from the forward to the input backward."""
        self.retained_bytes: dict[int, int] = {}
        """Bytes of these retained until the weight backward; at most `kept_bytes`, which `Costs`
        requires."""

    def _forward(self, key: Key, step: Step, schedule: Schedule) -> None:
        saved_bytes: dict[int, int] = {}  # by address of the storage

        def record(saved: Tensor) -> Tensor:
            saved_bytes[_address(saved)] = _size(saved)
            return saved.detach()  # the tensor itself could keep its own graph alive

        with saved_tensors_hooks(record, _identity):
            super()._forward(key, step, schedule)
        stage_input = step.inputs.get(key, step.microbatches[key[1]]["tokens"])
        saved_bytes[_address(stage_input)] = _size(stage_input)
        # Selective recomputation saves results outside of autograd's hooks.
        for block in recomputed_blocks(self.stages[key[0]]):
            saved_bytes |= {_address(result): _size(result) for result in block.saved_results}
        # Saved weights are counted with the parameters.
        for weight in self.stages[key[0]].parameters():
            saved_bytes.pop(_address(weight), None)
        self.kept_bytes[key[0]] = sum(saved_bytes.values())

    def _backward(self, key: Key, step: Step, schedule: Schedule) -> None:
        super()._backward(key, step, schedule)
        # Inputs and output gradients of linear layers, without their weights.
        factors = [part for _, *parts in step.deferred[key].factors for part in parts]
        size = sum({_address(part): _size(part) for part in factors}.values())
        self.retained_bytes[key[0]] = min(size, self.kept_bytes[key[0]])

    @property
    def message_bytes(self) -> int:
        """Size of the largest message between stages; 8 without messages."""
        shapes = self.mailbox.shapes.values()
        return max((dtype.itemsize * prod(shape) for dtype, shape in shapes), default=8)


def _identity(saved: Tensor) -> Tensor:
    return saved


def _address(tensor: Tensor) -> int:
    return _storage(tensor).data_ptr()


def _size(tensor: Tensor) -> int:
    return _storage(tensor).nbytes()


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    part = local_part(tensor)
    # The result of an asynchronous collective is a wrapper without storage.
    if isinstance(part, AsyncCollectiveTensor):
        part = part.elem
    return part.untyped_storage()


def message_times(groups: Groups, size_bytes: int) -> tuple[float, float]:
    """One-way seconds of a small message, and the extra seconds for `size_bytes`."""
    latency, total = (_one_way_seconds(groups, size) for size in (8, max(8, size_bytes)))
    return latency, max(0.0, total - latency)


def _one_way_seconds(groups: Groups, size_bytes: int) -> float:
    """Median one-way time of a message between this rank and its slower neighbor."""
    rank, last = groups.place.pipeline, groups.layout.pipeline - 1
    message = torch.zeros(size_bytes, dtype=torch.uint8, device=groups.message_device)
    group, slowest = groups.group("pipeline"), 0.0
    for first in range(last):
        # A rank exchanges with its previous neighbor first, then with the next one.
        if rank not in (first, first + 1):
            continue
        # The neighbor: `first + 1` or `first`.
        peer = groups.peer("pipeline", 2 * first + 1 - rank)
        times = []
        for _ in range(ROUND_TRIPS):
            start = perf_counter()
            for sends in (rank == first, rank != first):
                (dist.send if sends else dist.recv)(message, peer, group=group)
            if groups.device.type != "cpu":
                torch.accelerator.synchronize()
            times.append(perf_counter() - start)
        slowest = max(slowest, median(times) / 2)
    return slowest


def rank_slowness(times: Sequence[float], next_times: Sequence[float], ranks: int) -> list[float]:
    """Time of each rank relative to the fastest for the same work; 1 for all if nearly equal.

    Each segment was timed on its rank and on the next one, so the ratio compares neighboring ranks
    by the same work. Ratios to rank 0 are products of these.

    Args:
        times: seconds of each segment on its rank in `segment_stages`.
        next_times: seconds of each segment on the next rank.
        ranks: pipeline ranks.
    """
    segment_ranks = [segment * ranks // len(times) for segment in range(len(times))]
    slowness = [1.0]  # relative to rank 0
    for rank in range(ranks - 1):
        ratios = [
            next_time / time
            for segment_rank, time, next_time in zip(segment_ranks, times, next_times, strict=True)
            if segment_rank == rank
        ]
        slowness.append(slowness[-1] * median(ratios))
    fastest = min(slowness)
    if max(slowness) <= MAX_SLOWNESS * fastest:
        return [1.0] * ranks
    return [round(factor / fastest, 2) for factor in slowness]


def segment_costs(
    layers: Sequence[int],
    table: Tensor,
    latency_s: float,
    transfer_s: float,
    slowness: Sequence[float] = (),
) -> SegmentCosts:
    """Round costs to microseconds and bytes, and equalize segments that are nearly equal.

    Args:
        layers: layers of each segment.
        table: (5, segments): seconds of forward, input backward and weight backward; bytes kept and
            bytes retained.
        latency_s: seconds of a small message.
        transfer_s: additional seconds of a message between stages.
        slowness: time of each rank relative to the fastest; empty if ranks are equal. The times in
            the result are for the fastest rank.
    """
    forward, inputs, weights, saved, retained = table.tolist()
    if slowness:
        segments = range(len(layers))
        factors = [slowness[segment * len(slowness) // len(layers)] for segment in segments]
        forward, inputs, weights = (
            [time / factor for time, factor in zip(times, factors, strict=True)]
            for times in (forward, inputs, weights)
        )
    return SegmentCosts(
        layers=layers,
        forward=_equalized(forward),
        backward_input=_equalized(inputs),
        backward_weight=_equalized(weights),
        activation=[round(size) for size in saved],
        retained=[round(size) for size in retained],
        latency=round(latency_s * PER_SECOND),
        transfer=round(transfer_s * PER_SECOND),
        slowness=slowness if any(factor != 1.0 for factor in slowness) else (),
    )


def _equalized(seconds: Sequence[float]) -> list[int]:
    """Replace times near the median by it; return microseconds."""
    middle = median(seconds)
    tolerance = EQUAL_TOLERANCE * middle
    times = [middle if abs(time - middle) <= tolerance else time for time in seconds]
    return [max(1, round(time * PER_SECOND)) for time in times]
