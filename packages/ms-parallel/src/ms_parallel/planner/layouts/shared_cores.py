"""How long a pipeline takes whose processes share the cores of one machine.

While more processes compute than there are cores, each goes on at its share of them; while fewer
do, as where a pipeline fills, some cores have nothing to do. This lies between what ranks take that
have a core each and what all work takes that is spread evenly over the cores.
"""

from collections.abc import Iterator, Sequence
from functools import cache

from attrs import define, field

from ms_parallel.planner.layouts.pipeline import StageSeconds, played, table
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.schedule import Schedule

PARTS = {
    Kind.FORWARD: ("forward",),
    Kind.BACKWARD: ("backward_input", "backward_weight"),
    Kind.BACKWARD_INPUT: ("backward_input",),
    Kind.BACKWARD_WEIGHT: ("backward_weight",),
}
"""Times of a stage that an action takes."""
Place = tuple[bool, int, int]
"""Whether forwards, a stage, and a microbatch."""


@cache
def shared_makespan_s(
    name: str, ranks: int, microbatches: int, times: StageSeconds, copies: int, cores: int
) -> float:
    """Predict the seconds from the first forward to the last backward.

    Args:
        name: of a schedule that there is for these sizes.
        ranks: of the pipeline.
        microbatches: of an update; above some a rank they are not played one by one.
        times: of each stage, on a core of its own.
        copies: processes of each pipeline rank, which do the same at the same time.
        cores: of the machine that has all of them.
    """
    few = played(ranks, microbatches)
    made = table(name, ranks, few)
    assert isinstance(made, Schedule), made
    work = [times.work(made.stages_of(rank)) for rank in range(ranks)]
    each = max(max(work), sum(work) * copies / cores)
    return _Run(made, times, cores / copies).seconds() + (microbatches - few) * each


@define
class _Run:
    """A schedule that is played by the second, all that compute at once getting on alike."""

    schedule: Schedule
    times: StageSeconds
    at_once: float
    """Ranks that can compute at their full rate."""
    now: float = 0.0
    known: dict[Place, float] = field(factory=dict)
    """When what an action makes is there for the neighbor."""

    def seconds(self) -> float:
        """Play it to its end."""
        rows = [list(self._actions(row)) for row in self.schedule.computations()]
        at, left = [0] * len(rows), [0.0] * len(rows)
        running: set[int] = set()
        while True:
            for rank, row in enumerate(rows):
                if rank not in running and at[rank] < len(row) and self._begins(row[at[rank]]):
                    running.add(rank)
                    left[rank] = self._seconds(row[at[rank]])
            wakes = [when for when in self.known.values() if when > self.now]
            if not running and not wakes:
                return self.now
            rate = min(1.0, self.at_once / len(running)) if running else 1.0
            passed = min(
                [left[rank] / rate for rank in running] + [when - self.now for when in wakes]
            )
            # A sum of many may miss a moment by its rounding: what ends then, ends now.
            self.now += passed
            for rank in [*running]:
                left[rank] -= passed * rate
                if left[rank] <= 1e-12:
                    running.remove(rank)
                    self._end(rows[rank][at[rank]])
                    at[rank] += 1

    def _actions(self, row: Sequence[Action]) -> Iterator[Action]:
        for action in row:
            yield from action.computations

    def _begins(self, action: Action) -> bool:
        """Return whether what an action needs of another rank is there."""
        forward = action.kind is Kind.FORWARD
        before = action.stage - 1 if forward else action.stage + 1
        if action.kind is Kind.BACKWARD_WEIGHT or not 0 <= before < self.schedule.stages:
            return True
        when = self.known.get((forward, before, action.microbatch))
        return when is not None and when <= self.now

    def _seconds(self, action: Action) -> float:
        return sum(float(getattr(self.times, part)[action.stage]) for part in PARTS[action.kind])

    def _end(self, action: Action) -> None:
        if action.kind is Kind.BACKWARD_WEIGHT:
            return
        forward = action.kind is Kind.FORWARD
        homes = self.schedule.placement
        after = action.stage + (1 if forward else -1)
        travels = 0 <= after < self.schedule.stages and homes[after] != homes[action.stage]
        message = self.times.message if travels else 0.0
        self.known[forward, action.stage, action.microbatch] = self.now + message
