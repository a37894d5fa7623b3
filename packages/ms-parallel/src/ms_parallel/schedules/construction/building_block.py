"""Orders made by repeating one microbatch's pattern at a fixed interval.

A building block (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024) fixes when one
microbatch visits every stage. Repeated once an interval it fills a rank without collisions, and
the memory held is the lifespan of an activation over the interval. Differences from the paper:
1. Blocks are drawn with real times and messages rather than on a grid of equal passes.
2. The delay is free for each leg of the way rather than taken from a list of known blocks.
3. Only the order of forwards and backwards of inputs is kept. Played, the actions close up, and
   backwards of weights go where room is; the block only makes sure that there is room.
"""

from collections.abc import Sequence

from attrs import frozen

from ms_parallel.schedules.table.costs import Costs, Ticks
from ms_parallel.schedules.table.placements import ranks_of, stages_by_rank

Order = tuple[tuple[tuple[int, int, int], ...], ...]
"""For each rank its (0 forward or 1 backward of inputs, stage, microbatch) in order."""


@frozen(kw_only=True)
class BuildingBlock:
    """One microbatch's pattern, in ticks."""

    placement: tuple[int, ...]
    interval: int
    """Ticks from one microbatch to the next."""
    forward: tuple[int, ...]
    """Start of each stage's forward."""
    backward: tuple[int, ...]
    """Start of each stage's backward of inputs."""

    def order(self, microbatches: int) -> Order:
        """Sort the forwards and backwards of every rank by their starts."""
        rows: list[list[tuple[int, int, int, int]]] = [[] for _ in range(max(self.placement) + 1)]
        for stage, rank in enumerate(self.placement):
            row = rows[rank]
            for number in range(microbatches):
                shift = self.interval * number
                row.append((self.forward[stage] + shift, 0, stage, number))
                row.append((self.backward[stage] + shift, 1, stage, number))
        return tuple(
            tuple((kind, stage, number) for _, kind, stage, number in sorted(row)) for row in rows
        )

    def held(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Compute each rank's memory in the steady state, for activations of these sizes."""
        interval, forward, backward = self.interval, self.forward, self.backward
        held = []
        for mine in stages_by_rank(self.placement):
            most = 0
            for moment in mine:
                now, here = forward[moment] % interval, 0
                for stage in mine:
                    # Microbatches whose forward has begun and whose backward has not.
                    begun = (now - forward[stage]) // interval
                    ended = -((backward[stage] - now) // interval) - 1
                    here += (begun - ended) * sizes[stage]
                most = max(most, here)
            held.append(most)
        return tuple(held)


def unit_block(placement: Sequence[int], delays: Sequence[int]) -> BuildingBlock:
    """Draw the block of equal unit times and no latency; always possible. See `building_block`."""
    ticks = Costs.uniform(len(placement)).ticks()
    interval = 3 * (len(placement) // ranks_of(placement))
    block = building_block(placement, ticks, interval, delays)
    assert block is not None  # A unit always fits into what is left of whole units.
    return block


def building_block(
    placement: Sequence[int], ticks: Ticks, interval: int, delays: Sequence[int]
) -> BuildingBlock | None:
    """Draw a block.

    Args:
        placement: Rank of each stage, equally many a rank.
        ticks: Costs of the stages.
        interval: Ticks from one microbatch to the next, at least any rank's work for one.
        delays: Ticks of waiting on arrival at another rank, for each leg of the way: first the
            legs of the forward (one for each stage a rank has), then those of the backward.

    Returns:
        The block, or None if the times do not fit together without collision.
    """
    stages, legs = len(placement), len(delays)
    circles = [_Circle(interval) for _ in range(ranks_of(placement))]
    for stage, rank in enumerate(placement):
        circles[rank].to_come += [
            ticks.forward[stage],
            ticks.backward_input[stage],
            ticks.backward_weight[stage],
        ]
    starts: list[list[int]] = [[0] * stages, [0] * stages]
    path = [(0, s) for s in range(stages)] + [(1, s) for s in reversed(range(stages))]
    now = 0
    for step, (kind, stage) in enumerate(path):
        rank = placement[stage]
        before = path[step - 1][1]
        if step and placement[before] != rank:
            now += ticks.transfer[min(before, stage)] + ticks.latency
            now += delays[(step - 1) * legs // (2 * stages)]
        length = (ticks.forward if kind == 0 else ticks.backward_input)[stage]
        placed = circles[rank].place(now, length)
        if placed is None:
            return None
        starts[kind][stage] = placed
        now = placed + length
    return BuildingBlock(
        placement=tuple(placement),
        interval=interval,
        forward=tuple(starts[0]),
        backward=tuple(starts[1]),
    )


class _Circle:
    """A rank's time modulo the interval: what is taken, and what must still fit in."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.gaps: list[tuple[int, int]] = [(0, interval)]
        self.to_come: list[int] = []
        self.empty = True

    def place(self, earliest: int, length: int) -> int | None:
        """Take `length` ticks at the first start from `earliest` on that leaves room for the rest.

        Starts tried are `earliest` itself and the beginnings and ends of the gaps.
        """
        self.to_come.remove(length)
        rest = sorted(self.to_come, reverse=True)
        if self.empty:
            self.empty = False
            self.gaps = [((earliest + length) % self.interval, self.interval - length)]
            return earliest if _fits([self.interval - length], rest) else None
        for index, (begin, room) in enumerate(self.gaps):
            into = (earliest - begin) % self.interval
            if into + length <= room and self._take(index, into, length, rest):
                return earliest
        options: list[tuple[int, int, int]] = []
        for index, (begin, room) in enumerate(self.gaps):
            if room < length:
                continue
            options += [
                ((begin + offset - earliest) % self.interval, index, offset)
                for offset in {0, room - length}
            ]
        for delay, index, offset in sorted(options):
            if self._take(index, offset, length, rest):
                return earliest + delay
        return None

    def _take(self, index: int, offset: int, length: int, rest: list[int]) -> bool:
        """Take `length` ticks of a gap from `offset` on if the rest can still be packed."""
        begin, room = self.gaps[index]
        after = offset + length
        gaps = self.gaps[:index] + self.gaps[index + 1 :]
        if offset:
            gaps.append((begin, offset))
        if room > after:
            gaps.append(((begin + after) % self.interval, room - after))
        if not _fits([size for _, size in gaps], rest):
            return False
        self.gaps = gaps
        return True


def _fits(rooms: list[int], lengths: list[int]) -> bool:
    """Return whether the lengths, longest first, can be packed into the rooms.

    Their sum always can: an interval is no shorter than a rank's work.
    """
    if len(lengths) < 2:
        return not lengths or max(rooms, default=0) >= lengths[0]
    longest, rest, tried = lengths[0], lengths[1:], set()
    for index, room in enumerate(rooms):
        if room >= longest and room not in tried:
            tried.add(room)
            left = rooms.copy()
            left[index] = room - longest
            if _fits(left, rest):
                return True
    return False
