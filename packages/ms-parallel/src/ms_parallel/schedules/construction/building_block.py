"""Orders that repeat the pattern of one microbatch at a fixed interval.

A building block (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024) fixes when one
microbatch visits every stage. Repeated at an interval it fills each rank without collisions, and
the activation memory is the lifespan of an activation divided by the interval. Differences from
the paper:
1. Blocks use real times and message delays instead of a grid of equal passes.
2. The delay of each leg is a free parameter instead of coming from a list of known blocks.
3. Only the order of forwards and input backwards is used. In a simulation of the order, gaps close
   and weight backwards fill idle time; the block only leaves room for them.
"""

from collections.abc import Sequence

from attrs import frozen

from ms_parallel.schedules.table.costs import Costs, Ticks
from ms_parallel.schedules.table.placements import ranks_of, stages_by_rank

Order = tuple[tuple[tuple[int, int, int], ...], ...]
"""(0 forward or 1 input backward, stage, microbatch) per rank, in order."""


@frozen(kw_only=True)
class BuildingBlock:
    """Pattern of one microbatch, in ticks."""

    placement: tuple[int, ...]
    interval: int
    """Ticks between consecutive microbatches."""
    forward: tuple[int, ...]
    """Start of the forward of each stage."""
    backward: tuple[int, ...]
    """Start of the input backward of each stage."""

    def order(self, microbatches: int) -> Order:
        """Sort the forwards and input backwards of every rank by start time."""
        rows: list[list[tuple[int, int, int, int]]] = [[] for _ in range(max(self.placement) + 1)]
        for stage, rank in enumerate(self.placement):
            row = rows[rank]
            for number in range(microbatches):
                shift = self.interval * number
                row.append((self.forward[stage] + shift, 0, stage, number))
                row.append((self.backward[stage] + shift, 1, stage, number))
        return tuple(
            tuple((phase, stage, number) for _, phase, stage, number in sorted(row)) for row in rows
        )

    def peak_memory(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Steady-state peak memory of each rank, for activations of these sizes."""
        interval, forward, backward = self.interval, self.forward, self.backward
        peaks = []
        for stages in stages_by_rank(self.placement):
            peak = 0
            # Memory can only peak at the start of a forward.
            for reference in stages:
                time, live = forward[reference] % interval, 0
                for stage in stages:
                    # Microbatches between the start of their forward and the end of their backward.
                    started = (time - forward[stage]) // interval
                    ended = -((backward[stage] - time) // interval) - 1
                    live += (started - ended) * sizes[stage]
                peak = max(peak, live)
            peaks.append(peak)
        return tuple(peaks)


def unit_block(placement: Sequence[int], delays: Sequence[int]) -> BuildingBlock:
    """Build the block with unit times and no latency, which always exists; see `building_block`."""
    ticks = Costs.uniform(len(placement)).ticks()
    interval = 3 * (len(placement) // ranks_of(placement))
    block = building_block(placement, ticks, interval, delays)
    assert block is not None  # unit lengths always fit into what remains of whole units
    return block


def building_block(
    placement: Sequence[int], ticks: Ticks, interval: int, delays: Sequence[int]
) -> BuildingBlock | None:
    """Build a block.

    Args:
        placement: rank of each stage, with the same number of stages on every rank.
        ticks: costs of the stages.
        interval: ticks between consecutive microbatches; at least the busiest rank's work.
        delays: ticks to wait on arrival at another rank, for each leg of the path: first the
            forward legs (one per stage of a rank), then the backward legs.

    Returns:
        The block, or None if some times collide.
    """
    stages, legs = len(placement), len(delays)
    timelines = [_ModularTime(interval) for _ in range(ranks_of(placement))]
    for stage, rank in enumerate(placement):
        timelines[rank].remaining += [
            ticks.forward[stage],
            ticks.backward_input[stage],
            ticks.backward_weight[stage],
        ]
    starts: list[list[int]] = [[0] * stages, [0] * stages]
    # The path of a microbatch: F0, F1, ..., I1, I0.
    path = [(0, s) for s in range(stages)] + [(1, s) for s in reversed(range(stages))]
    time = 0
    for step, (phase, stage) in enumerate(path):
        rank = placement[stage]
        previous_stage = path[step - 1][1]
        if step and placement[previous_stage] != rank:
            time += ticks.transfer[min(previous_stage, stage)] + ticks.latency
            time += delays[(step - 1) * legs // (2 * stages)]
        length = (ticks.forward if phase == 0 else ticks.backward_input)[stage]
        start = timelines[rank].place(time, length)
        if start is None:
            return None
        starts[phase][stage] = start
        time = start + length
    return BuildingBlock(
        placement=tuple(placement),
        interval=interval,
        forward=tuple(starts[0]),
        backward=tuple(starts[1]),
    )


class _ModularTime:
    """Free time of a rank modulo the interval, and the lengths that must still fit in."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.gaps: list[tuple[int, int]] = [(0, interval)]
        self.remaining: list[int] = []
        self.empty = True

    def place(self, earliest: int, length: int) -> int | None:
        """Reserve `length` ticks at the first start from `earliest` that leaves room for the rest.

        Tries `earliest` itself and the start and end of every gap.
        """
        self.remaining.remove(length)
        remaining = sorted(self.remaining, reverse=True)
        # The first pass may start at any time; it fixes the phase of the rank's timeline.
        if self.empty:
            self.empty = False
            self.gaps = [((earliest + length) % self.interval, self.interval - length)]
            return earliest if _fits([self.interval - length], remaining) else None
        for index, (gap_start, size) in enumerate(self.gaps):
            offset = (earliest - gap_start) % self.interval
            if offset + length <= size and self._reserve(index, offset, length, remaining):
                return earliest
        options: list[tuple[int, int, int]] = []
        for index, (gap_start, size) in enumerate(self.gaps):
            if size < length:
                continue
            options += [
                ((gap_start + offset - earliest) % self.interval, index, offset)
                for offset in {0, size - length}  # at an end of the gap, not in its middle
            ]
        # Earliest start first.
        for delay, index, offset in sorted(options):
            if self._reserve(index, offset, length, remaining):
                return earliest + delay
        return None

    def _reserve(self, index: int, offset: int, length: int, remaining: list[int]) -> bool:
        """Reserve `length` ticks of a gap from `offset` if the remaining lengths still fit."""
        gap_start, gap_size = self.gaps[index]
        end = offset + length
        gaps = self.gaps[:index] + self.gaps[index + 1 :]
        if offset:
            gaps.append((gap_start, offset))
        if gap_size > end:
            gaps.append(((gap_start + end) % self.interval, gap_size - end))
        if not _fits([size for _, size in gaps], remaining):
            return False
        self.gaps = gaps
        return True


def _fits(gaps: list[int], lengths: list[int]) -> bool:
    """Return whether the lengths, in descending order, can be packed into the gaps.

    The total always fits, as an interval is at least as long as a rank's work.
    """
    if len(lengths) < 2:
        return not lengths or max(gaps, default=0) >= lengths[0]
    longest, others, tried = lengths[0], lengths[1:], set()
    # Try the longest pass in each distinct gap, then pack the others recursively.
    for index, gap in enumerate(gaps):
        if gap >= longest and gap not in tried:
            tried.add(gap)
            smaller_gaps = gaps.copy()
            smaller_gaps[index] = gap - longest
            if _fits(smaller_gaps, others):
                return True
    return False
