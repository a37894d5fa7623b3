"""Probes of a model's segments: their schedule, the memory they keep, the time of messages."""

from collections.abc import Sequence
from math import prod
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ms_parallel.cluster.groups import Groups
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.registry import model_plan
from ms_parallel.pipeline.layer_split import Staged
from ms_parallel.pipeline.runtime import Key, Runtime, Step
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.placements import stages_by_rank
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.schedules.table.segments import SegmentCosts
from ms_parallel.split.memory.recompute import recomputed_blocks
from ms_parallel.split.part import local_part
from ms_parallel.torch_private import AsyncCollectiveTensor

MICROBATCHES = 3
"""Microbatches of a step: the first gathers sharded weights and the last sums gradients, so one
does neither, and the median counts that one."""
ECHOES = 10
"""Messages there and back, of each size."""
ALIKE = 0.05
"""Segments that differ by no more than this share of their median count as equal."""
UNLIKE = 1.2
"""Ranks count as alike where the slowest takes at most so many times as long as the fastest."""
PER_SECOND = 1_000_000
"""Costs are whole microseconds: a schedule of the same costs is the same on every process."""


def segment_layers(config: ModelConfig) -> tuple[int, ...]:
    """Count the layers of each segment: from one place where the model can be cut to the next."""
    cuts = model_plan(config).cuts
    ends = [*cuts[1:], config.num_hidden_layers]
    return tuple(end - begin for begin, end in zip(cuts, ends, strict=True))


def segment_stages(layers: Sequence[int], ranks: int, shift: int = 0) -> Staged:
    """Build a schedule with one stage a segment: all forwards, then backwards in two parts.

    Each rank has neighboring stages: its own, or those of the rank so many places before it.
    """
    placement = [(segment * ranks // len(layers) + shift) % ranks for segment in range(len(layers))]
    rows = [
        [Action(Kind.FORWARD, s, number) for number in range(MICROBATCHES) for s in mine]
        + [
            Action(kind, stage, number)
            for number in range(MICROBATCHES)
            for stage in reversed(mine)
            for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        ]
        for mine in stages_by_rank(tuple(placement))
    ]
    schedule = Schedule.from_computations(rows, placement, MICROBATCHES, "measurement")
    return Staged(schedule=schedule, layers=tuple(layers))


def random_batch(vocabulary: int, rows: int, length: int) -> dict[str, Tensor]:
    """Draw a step of random tokens (b, S); the global generator is not touched."""
    generator = torch.Generator().manual_seed(0)
    size = (MICROBATCHES * rows, length + 1)
    text = torch.randint(0, vocabulary, size, generator=generator)
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


class MemoryRuntime(Runtime):
    """A runtime that adds up what each stage keeps of its last microbatch, weights left out."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime.stages, runtime.groups, runtime.calls, runtime.sharding)
        self.mailbox = runtime.mailbox
        self.kept_bytes: dict[int, int] = {}
        """Kept from the forward to the backward of inputs."""
        self.retained_bytes: dict[int, int] = {}
        """Kept from there to the backward of weights; never more, as `Costs` demands."""

    def _forward(self, key: Key, step: Step, schedule: Schedule) -> None:
        kept: dict[int, int] = {}

        def keep(saved: Tensor) -> Tensor:
            kept[_place(saved)] = _size(saved)
            return saved.detach()  # the tensor itself could keep its own graph alive

        with saved_tensors_hooks(keep, _itself):
            super()._forward(key, step, schedule)
        entering = step.inputs.get(key, step.microbatches[key[1]]["tokens"])
        kept[_place(entering)] = _size(entering)
        for block in recomputed_blocks(self.stages[key[0]]):
            kept |= {_place(result): _size(result) for result in block.saved_results}
        for weight in self.stages[key[0]].parameters():
            kept.pop(_place(weight), None)
        self.kept_bytes[key[0]] = sum(kept.values())

    def _backward(self, key: Key, step: Step, schedule: Schedule) -> None:
        super()._backward(key, step, schedule)
        factors = [part for _, *parts in step.deferred[key].factors for part in parts]
        size = sum({_place(part): _size(part) for part in factors}.values())
        self.retained_bytes[key[0]] = min(size, self.kept_bytes[key[0]])

    @property
    def message_bytes(self) -> int:
        """Size of the largest message between stages; 8 where there is none."""
        shapes = self.mailbox.shapes.values()
        return max((dtype.itemsize * prod(shape) for dtype, shape in shapes), default=8)


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


def message_times(groups: Groups, size_bytes: int) -> tuple[float, float]:
    """Time a small message one way, in seconds, and what one of this size takes beyond it."""
    small, whole = (_echo(groups, size) for size in (8, max(8, size_bytes)))
    return small, max(0.0, whole - small)


def _echo(groups: Groups, size_bytes: int) -> float:
    """Time a message one way between this rank and each neighbor: the slower one's median."""
    here, last = groups.place.pipeline, groups.layout.pipeline - 1
    box = torch.zeros(size_bytes, dtype=torch.uint8, device=groups.wire)
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


def rank_slowness(here: Sequence[float], after: Sequence[float], ranks: int) -> list[float]:
    """Return how many times as long each rank takes as the fastest; 1 if they hardly differ.

    Each segment was timed on its rank and on the next one, so neighbors compare by the same work.

    Args:
        here: seconds of each segment on its rank, as `segment_stages` places it.
        after: on the rank after it.
        ranks: of the pipeline.
    """
    holders = [segment * ranks // len(here) for segment in range(len(here))]
    found = [1.0]
    for rank in range(ranks - 1):
        ratios = [
            later / earlier
            for holder, earlier, later in zip(holders, here, after, strict=True)
            if holder == rank
        ]
        found.append(found[-1] * median(ratios))
    fastest = min(found)
    if max(found) <= UNLIKE * fastest:
        return [1.0] * ranks
    return [round(each / fastest, 2) for each in found]


def segment_costs(
    layers: Sequence[int],
    table: Tensor,
    latency_s: float,
    transfer_s: float,
    slowness: Sequence[float] = (),
) -> SegmentCosts:
    """Round to whole microseconds and bytes, and make segments alike that hardly differ.

    Args:
        layers: of each segment.
        table: (5, segments): seconds of forward, backward of inputs, backward of weights; bytes
            kept and retained.
        latency_s: of a small message.
        transfer_s: that a message between stages takes beyond that.
        slowness: of each rank, beside the fastest; none where they are alike. Times come out as
            those of the fastest.
    """
    forward, inputs, weights, kept, retained = table.tolist()
    if slowness:
        slow = [slowness[at * len(slowness) // len(layers)] for at in range(len(layers))]
        forward, inputs, weights = (
            [time / each for time, each in zip(times, slow, strict=True)]
            for times in (forward, inputs, weights)
        )
    return SegmentCosts(
        layers=layers,
        forward=_alike(forward),
        backward_input=_alike(inputs),
        backward_weight=_alike(weights),
        activation=[round(size) for size in kept],
        retained=[round(size) for size in retained],
        latency=round(latency_s * PER_SECOND),
        transfer=round(transfer_s * PER_SECOND),
        slowness=slowness if any(each != 1.0 for each in slowness) else (),
    )


def _alike(seconds: Sequence[float]) -> list[int]:
    middle = median(seconds)
    near = [middle if abs(time - middle) <= ALIKE * middle else time for time in seconds]
    return [max(1, round(time * PER_SECOND)) for time in near]
