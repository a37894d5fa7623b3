"""Time of a pipeline whose processes share the cores of one machine.

While more processes compute than the machine has cores, they share the cores equally; while fewer
compute, as during the fill of the pipeline, cores are idle. The result is between the time with one
core per rank and the total work divided by the number of cores.
"""

from collections.abc import Iterator, Sequence
from functools import cache

from attrs import define, field

from ms_parallel.planner.layouts.pipeline import StageSeconds, simulated_microbatches, table
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.schedule import Schedule

PARTS = {
    Kind.FORWARD: ("forward",),
    Kind.BACKWARD: ("backward_input", "backward_weight"),
    Kind.BACKWARD_INPUT: ("backward_input",),
    Kind.BACKWARD_WEIGHT: ("backward_weight",),
}
"""Times of a stage that an action takes."""
ResultKey = tuple[bool, int, int]
"""(is forward, stage, microbatch)."""


@cache
def shared_makespan_s(
    name: str, ranks: int, microbatches: int, times: StageSeconds, copies: int, cores: int
) -> float:
    """Predict the seconds from the first forward to the last backward.

    Args:
        name: schedule that exists for these sizes.
        ranks: pipeline ranks.
        microbatches: microbatches per step; only some per rank are simulated.
        times: times of each stage on one core.
        copies: processes of each pipeline rank, which do the same at the same time.
        cores: cores of the machine, which runs all processes.
    """
    simulated = simulated_microbatches(ranks, microbatches)
    schedule = table(name, ranks, simulated)
    assert isinstance(schedule, Schedule), schedule
    work = [times.work(schedule.stages_of(rank)) for rank in range(ranks)]
    # A further microbatch adds the work of the busiest rank, or of all cores if they are scarcer.
    per_microbatch = max(max(work), sum(work) * copies / cores)
    return (
        _Run(schedule, times, cores / copies).seconds()
        + (microbatches - simulated) * per_microbatch
    )


@define
class _Run:
    """Simulation of a schedule in which running computations share the cores equally."""

    schedule: Schedule
    times: StageSeconds
    at_once: float
    """Number of ranks that can compute at full rate."""
    time: float = 0.0
    arrivals: dict[ResultKey, float] = field(factory=dict)
    """Time at which each result is available to the neighbor."""

    def seconds(self) -> float:
        """Run to the end and return the time."""
        rows = [list(self._actions(row)) for row in self.schedule.computations()]
        positions, remaining = [0] * len(rows), [0.0] * len(rows)
        running: set[int] = set()
        while True:
            # Start the next computation of every idle rank whose input has arrived.
            for rank, row in enumerate(rows):
                if (
                    rank not in running
                    and positions[rank] < len(row)
                    and self._can_start(row[positions[rank]])
                ):
                    running.add(rank)
                    remaining[rank] = self._seconds(row[positions[rank]])
            arrivals = [arrival for arrival in self.arrivals.values() if arrival > self.time]
            if not running and not arrivals:
                return self.time
            # Advance to the next event: a computation ends, or a message arrives.
            rate = min(1.0, self.at_once / len(running)) if running else 1.0
            elapsed = min(
                [remaining[rank] / rate for rank in running]
                + [arrival - self.time for arrival in arrivals]
            )
            # Rounding may miss the end of an action slightly; see the tolerance below.
            self.time += elapsed
            for rank in [*running]:
                remaining[rank] -= elapsed * rate
                if remaining[rank] <= 1e-12:
                    running.remove(rank)
                    self._end(rows[rank][positions[rank]])
                    positions[rank] += 1

    def _actions(self, row: Sequence[Action]) -> Iterator[Action]:
        for action in row:
            yield from action.computations

    def _can_start(self, action: Action) -> bool:
        """Return whether the input of an action from another rank has arrived."""
        forward = action.kind is Kind.FORWARD
        source = action.stage - 1 if forward else action.stage + 1
        # Weight gradients need no message; the pipeline's ends have no source.
        if action.kind is Kind.BACKWARD_WEIGHT or not 0 <= source < self.schedule.stages:
            return True
        arrival = self.arrivals.get((forward, source, action.microbatch))
        return arrival is not None and arrival <= self.time

    def _seconds(self, action: Action) -> float:
        return sum(float(getattr(self.times, part)[action.stage]) for part in PARTS[action.kind])

    def _end(self, action: Action) -> None:
        if action.kind is Kind.BACKWARD_WEIGHT:
            return
        forward = action.kind is Kind.FORWARD
        placement = self.schedule.placement
        target = action.stage + (1 if forward else -1)
        crosses_ranks = (
            0 <= target < self.schedule.stages and placement[target] != placement[action.stage]
        )
        message = self.times.message if crosses_ranks else 0.0  # same rank: no message
        self.arrivals[forward, action.stage, action.microbatch] = self.time + message
