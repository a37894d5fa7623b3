"""Whether run B is slower than run A: a test on the steps' medians, and what moved.

Medians and median deviations of the logarithms are compared, as a few steps are always outliers,
by Student's distribution. Steps of one run resemble their neighbours: three of them count as one. A
regression is one that runs of equal pace would show in fewer than 2% of cases (its p-value), and
that is 3% or more: less than that differs between two runs of one program.

A run's event log has every step, and most of them untraced; where both runs have one, its steps are
compared, and the traces only show what moved. Steps are also longer where other programs have the
CPUs; the log holds how long each waited for one. A regression is one with that wait and without it.

One run of each does not show how far two runs of one program lie apart, so 2.5% is taken for it.
Where there are more of A or of B, the runs' medians are compared as they scatter from run to run.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ms_profile.analysis.activity import PHASES
from ms_profile.analysis.operators import operator_table
from ms_profile.analysis.whole_run import Analysis
from ms_profile.errors import ProfileError, TraceError
from ms_profile.log.event_reader import EventFilter, read_events
from ms_profile.log.manifest import read_run

logger = logging.getLogger(__name__)
LEAST_STEPS = 4
SIGNIFICANCE = 0.02
LEAST_CHANGE = 0.03
ALIKE = 3.0
RUNS_APART = 0.025
"""Standard deviation of the pace of one program's runs, as `benchmarks/comparing.py` found it on a
quiet host; more steps of a run do not lessen it."""
DRAWS = 20_000
LONGEST_S = 1e8
"""A longer step, three years, is taken for a damaged time."""
POWER = 0.9
Times = NDArray[np.float64]
Runs = Sequence[Times]


@frozen(kw_only=True)
class Change:
    """One quantity in both runs, per step, in ns."""

    name: str
    before_ns: float
    after_ns: float

    @property
    def share(self) -> float | None:
        """Relative change; None where there was nothing before."""
        return self.after_ns / self.before_ns - 1 if self.before_ns else None


@frozen(kw_only=True)
class Comparison:
    """What differs between two runs."""

    step: Change
    """Change of the median step, taken on its slowest rank."""
    p_value: float
    """Probability that runs of equal pace differ by as much in the direction that was seen."""
    detectable: float | None
    """Relative slow-down that 9 in 10 such pairs of runs would show as a regression.

    None where the steps are so few, or scatter so much, that not even a tenfold one would show.
    """
    steps: tuple[int, int]
    """How many of A and of B were compared."""
    runs: tuple[int, int]
    """How many runs of A and of B."""
    regression: bool
    improvement: bool
    phases: tuple[Change, ...]
    """Per step and rank; those that either run shows."""
    not_measurable: tuple[str, ...]
    """Phases that the traces of one run, or of both, cannot show."""
    operators: tuple[Change, ...]
    """Self time per step and rank, the largest change first."""


@frozen(kw_only=True, eq=False)
class RecordedSteps:
    """Steps of a run as its log has them, (S,) ns each, in order."""

    wall_ns: Times
    """The slowest rank's."""
    without_cpu_wait_ns: Times | None
    """The same less the longest wait of a rank for a CPU; None where that was not counted."""

    @property
    def cpu_wait_share(self) -> float | None:
        """Share of the time in which a rank waited for a CPU."""
        if self.without_cpu_wait_ns is None:
            return None
        return float(1 - self.without_cpu_wait_ns.sum() / self.wall_ns.sum())


def compare(
    before: Analysis,
    after: Analysis,
    *,
    least_change: float = LEAST_CHANGE,
    recorded: tuple[Sequence[RecordedSteps], Sequence[RecordedSteps]] | None = None,
) -> Comparison:
    """Compare two runs' steps, phases and operators.

    Args:
        before: run A.
        after: run B.
        least_change: relative change that counts.
        recorded: steps of each run of A and of each of B, one or more, as `recorded_steps` reads
            them; without them, the traces'. With three runs or more in all, their scatter from
            run to run decides.

    Raises:
        TraceError: a run has fewer than 4 named steps.
    """
    pairs: list[tuple[Runs, Runs]]
    if recorded is None:
        pairs = [([step_times(before)], [step_times(after)])]
    else:
        pairs = _series(*recorded)
    old, new = pairs[0]
    slower = max(compare_runs(a, b) for a, b in pairs)
    faster = max(compare_runs(b, a) for a, b in pairs)
    shares = [_typical(b) / _typical(a) - 1 for a, b in pairs]
    phases, not_measurable = _phases(before, after)
    change = Change(name="step", before_ns=_typical(old), after_ns=_typical(new))
    return Comparison(
        step=change,
        p_value=faster if change.after_ns < change.before_ns else slower,
        detectable=_most([_detectable(a, b, least_change) for a, b in pairs]),
        steps=(sum(map(len, old)), sum(map(len, new))),
        runs=(len(old), len(new)),
        regression=slower < SIGNIFICANCE and min(shares) >= least_change,
        improvement=faster < SIGNIFICANCE and max(shares) <= -least_change,
        phases=phases,
        not_measurable=not_measurable,
        operators=_operators(before, after),
    )


def _series(old: Sequence[RecordedSteps], new: Sequence[RecordedSteps]) -> list[tuple[Runs, Runs]]:
    """Return pairs of series that must all show B slower: wall times, and those less CPU waits."""
    pairs: list[tuple[Runs, Runs]] = [([a.wall_ns for a in old], [b.wall_ns for b in new])]
    left = [[one.without_cpu_wait_ns for one in own] for own in (old, new)]
    counted = [[one for one in own if one is not None] for own in left]
    if counted == left:
        pairs.append((counted[0], counted[1]))
    return pairs


def _typical(runs: Runs) -> float:
    """Return the geometric mean of the runs' median steps, ns."""
    return float(np.exp(np.mean(np.log([np.median(run) for run in runs]))))


def _most(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return max(known) if len(known) == len(shares) else None


def recorded_steps(
    folder: Path, *, on_problem: Callable[[str], None] = logger.warning
) -> RecordedSteps | None:
    """Return the steps that a run's event log holds.

    Steps that the tracer slowed are left out, and those before its first window, which fill caches.
    None where the folder is no run, or has fewer than 4 such steps on all ranks.

    Args:
        folder: of the run.
        on_problem: called with a sentence on a part of its records that cannot be read.
    """
    if not (folder / "manifest.json").is_file():
        return None
    try:
        run = read_run(folder)
        wanted = EventFilter(kinds={"step"})
        events = list(read_events(folder, wanted, on_problem=on_problem))
    except ProfileError as error:
        on_problem(str(error))
        return None
    times: dict[int, dict[int, float]] = defaultdict(dict)
    waits: dict[int, dict[int, float]] = defaultdict(dict)
    for event in events:
        length, wait = event.fields.get("step_time_s"), event.fields.get("cpu_wait_s")
        usual = "traced" not in event.fields and (event.step or 0) >= run.schedule.skip
        if (
            event.step is not None
            and usual
            and isinstance(length, float)
            and 0 < length < LONGEST_S
        ):
            times[event.step][event.rank] = length * 1e9
            if isinstance(wait, float) and wait >= 0:
                waits[event.step][event.rank] = min(wait, length) * 1e9
    ranks = {rank for own in times.values() for rank in own}
    full = [step for step, own in sorted(times.items()) if len(own) == len(ranks)]
    if len(full) < LEAST_STEPS:
        return None
    wall = np.array([max(times[step].values()) for step in full])
    counted = all(len(waits[step]) == len(ranks) for step in full)
    waited = np.array([max(waits[step].values()) for step in full]) if counted else None
    # A step is never all wait: logarithms are taken of what is left.
    left = None if waited is None else np.maximum(wall - waited, 0.01 * wall)
    return RecordedSteps(wall_ns=wall, without_cpu_wait_ns=left)


def step_times(analysis: Analysis) -> Times:
    """Return the wall time of each step that all ranks recorded, the slowest rank's, (S,) ns.

    Raises:
        TraceError: there are fewer than 4.
    """
    times: dict[int, list[int]] = defaultdict(list)
    for one in analysis.ranks.values():
        for step in one.breakdowns:
            if step.step.number is not None and step.step.duration_ns > 0:
                times[step.step.number].append(step.step.duration_ns)
    full = [max(own) for _, own in sorted(times.items()) if len(own) == len(analysis.ranks)]
    if len(full) < LEAST_STEPS:
        raise TraceError(
            f"a run has {len(full)} named steps; comparing takes {LEAST_STEPS} or more: "
            "record more steps, and call the profiler's step()"
        )
    return np.array(full, np.float64)


def compare_runs(before: Runs, after: Runs, *, seed: int = 0) -> float:
    """Return the p-value, 0 to 1, of the median step of `after` being larger by as much as it is.

    Args:
        before: step times of each run of one kind, each (N,), positive, in order.
        after: of the other.
        seed: of the draws from Student's distribution.
    """
    difference, error, freedom = _difference(before, after)
    if error == 0:
        return 0.0 if difference > 0 else 1.0
    draws = np.random.default_rng(seed).standard_t(freedom, DRAWS)
    return float(((draws >= difference / error).sum() + 1) / (DRAWS + 1))


def _difference(before: Runs, after: Runs) -> tuple[float, float, float]:
    """Compute the medians' difference in logarithms, its standard error, and degrees of freedom."""
    if len(before) + len(after) > 2:
        return _between_runs(before, after)
    old, new = np.log(before[0]), np.log(after[0])
    apart = [np.abs(own - np.median(own)) for own in (old, new)]
    # 1.4826 makes the median deviation a standard deviation; medians took 2 of the freedoms.
    freedom = max((len(old) + len(new)) / ALIKE - 2, 1.0)
    spread = 1.4826 * float(np.median(np.concatenate(apart))) * (1 + 1 / freedom)
    # 1.25 is how much less sure a median is than a mean.
    error = 1.25 * spread * (ALIKE / len(old) + ALIKE / len(new)) ** 0.5
    error = (error**2 + 2 * RUNS_APART**2) ** 0.5
    return float(np.median(new) - np.median(old)), error, freedom


def _between_runs(before: Runs, after: Runs) -> tuple[float, float, float]:
    """Return the same from one median a run and the variance that the runs of a kind share."""
    old, new = (np.array([np.log(np.median(run)) for run in runs]) for runs in (before, after))
    freedom = len(old) + len(new) - 2
    squares = ((old - old.mean()) ** 2).sum() + ((new - new.mean()) ** 2).sum()
    error = float(squares / freedom * (1 / len(old) + 1 / len(new))) ** 0.5
    return float(new.mean() - old.mean()), error, float(freedom)


def _detectable(before: Runs, after: Runs, least_change: float) -> float | None:
    """Return the slow-down that is significant in 9 of 10 pairs of such runs."""
    _, error, freedom = _difference(before, after)
    draws = np.random.default_rng(0).standard_t(freedom, DRAWS)
    beyond, most = np.quantile(draws, [1 - SIGNIFICANCE, POWER])
    logarithm = float(error * (beyond + most))
    return max(float(np.expm1(logarithm)), least_change) if logarithm < np.log(10) else None


def _phases(before: Analysis, after: Analysis) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    """Compare what was measured in both runs, and name what was not."""

    def per_step(analysis: Analysis, phase: str) -> float | None:
        amounts = [
            step.phases_ns[phase]
            for one in analysis.ranks.values()
            for step in one.breakdowns
            if phase not in one.activity.unmeasured
        ]
        return float(np.mean(amounts)) if amounts else None

    found, missing = [], []
    for phase in PHASES:
        old, new = per_step(before, phase), per_step(after, phase)
        if old is None or new is None:
            missing.append(phase)
        elif old or new:
            found.append(Change(name=phase, before_ns=old, after_ns=new))
    return tuple(found), tuple(missing)


def _operators(before: Analysis, after: Analysis) -> tuple[Change, ...]:
    def per_step(analysis: Analysis) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        steps = 0
        for one in analysis.ranks.values():
            steps += len(one.breakdowns)
            for row in operator_table(one.trace):
                if not row.name.startswith("ProfilerStep"):
                    sums[row.name] += row.self_ns
        return {name: amount / max(steps, 1) for name, amount in sums.items()}

    old, new = per_step(before), per_step(after)
    changes = [
        Change(name=name, before_ns=old.get(name, 0.0), after_ns=new.get(name, 0.0))
        for name in old.keys() | new.keys()
        if old.get(name) or new.get(name)
    ]
    return tuple(sorted(changes, key=lambda one: (-abs(one.after_ns - one.before_ns), one.name)))
