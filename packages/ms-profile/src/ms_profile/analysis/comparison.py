"""Test whether run B is slower than run A, and show which phases and operators changed.

Step times are compared by the medians and median deviations of their logarithms, which tolerate
outliers, with Student's t distribution. Consecutive steps are correlated, so three count as one
independent sample. A regression has a p-value below 2% (the probability of such a result for runs
of equal speed) and is at least 3%, as two runs of one program differ by less.

The event log of a run has all steps, most of them untraced. If both runs have one, the logged steps
are compared and the traces only show what changed. Steps also take longer while other programs use
the CPUs, and the log has each step's wait for a CPU: a slowdown must be significant with and
without it.

A single run of A and of B does not show how much runs of one program vary; a standard deviation of
2.5% is assumed. With more runs, their medians are compared, with the variance between the runs.
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
from ms_profile.arguments import check_items, check_number, check_type, shown
from ms_profile.errors import ProfileError, TraceError
from ms_profile.log.event_reader import EventFilter, read_events
from ms_profile.log.manifest import read_run

logger = logging.getLogger(__name__)
MIN_STEPS = 4
SIGNIFICANCE = 0.02
LEAST_CHANGE = 0.03
CORRELATED_STEPS = 3.0
RUN_STD = 0.025
"""Relative standard deviation between runs of one program, measured on a quiet host by
`benchmarks/comparing.py`; more steps per run do not reduce it."""
DRAWS = 20_000  # from Student's distribution, so p-values have steps of 1 / 20,000
MAX_STEP_S = 1e8
"""A longer step (three years) is treated as damage in the file."""
POWER = 0.9
Times = NDArray[np.float64]
Runs = Sequence[Times]


@frozen(kw_only=True)
class Change:
    """A quantity in both runs, in ns per step."""

    name: str
    before_ns: float
    after_ns: float

    @property
    def share(self) -> float | None:
        """Relative change; None if the quantity was 0 before."""
        return self.after_ns / self.before_ns - 1 if self.before_ns else None


@frozen(kw_only=True)
class Comparison:
    """Differences between two runs."""

    step: Change
    """Change of the median step time of the slowest rank."""
    p_value: float
    """Probability that runs of equal speed differ at least this much in the observed direction."""
    detectable: float | None
    """Relative slowdown that 9 in 10 such pairs of runs would show as a regression.

    None if there are too few steps, or too much variance, to detect even a tenfold slowdown.
    """
    steps: tuple[int, int]
    """Number of steps compared, of A and of B."""
    runs: tuple[int, int]
    """Number of runs, of A and of B."""
    regression: bool
    improvement: bool
    phases: tuple[Change, ...]
    """Time by phase, per step and rank; only phases that both runs measured."""
    not_measurable: tuple[str, ...]
    """Phases that the traces of one or both runs cannot show."""
    operators: tuple[Change, ...]
    """Self time by operator, per step and rank, largest change first."""


@frozen(kw_only=True, eq=False)
class RecordedSteps:
    """Step times from a run's event log, (S,) ns, in order."""

    wall_ns: Times
    """Wall time of the slowest rank."""
    without_cpu_wait_ns: Times | None
    """Wall time minus the longest CPU wait of a rank; None if waits were not measured."""

    @property
    def cpu_wait_share(self) -> float | None:
        """Share of the time that a rank waited for a CPU."""
        if self.without_cpu_wait_ns is None:
            return None
        return float(1 - self.without_cpu_wait_ns.sum() / self.wall_ns.sum())


def compare(
    before: Analysis,
    after: Analysis,
    *,
    min_change: float = LEAST_CHANGE,
    recorded: tuple[Sequence[RecordedSteps], Sequence[RecordedSteps]] | None = None,
) -> Comparison:
    """Compare the steps, phases and operators of two runs.

    Args:
        before: run A.
        after: run B.
        min_change: smallest relative change that counts.
        recorded: step times of the runs of A and of the runs of B, from `recorded_steps`. None:
            use the steps of the traces. With 3 or more runs in total, the variance between runs
            decides.

    Raises:
        TraceError: a run has fewer than 4 named steps.
    """
    for name, analysis in (("before", before), ("after", after)):
        check_type(name, analysis, Analysis, "an Analysis, as analyse returns", error=TraceError)
    check_number("min_change", min_change, minimum=0, error=TraceError)
    if recorded is not None and (not isinstance(recorded, Sequence) or len(recorded) != 2):
        raise TraceError(
            f"recorded must be the RecordedSteps of A's runs and of B's, got {shown(recorded)}"
        )
    pairs: list[tuple[Runs, Runs]]
    if recorded is None:
        pairs = [([step_times(before)], [step_times(after)])]
    else:
        for runs in recorded:
            check_items("recorded", runs, RecordedSteps, "RecordedSteps", error=TraceError)
        pairs = _series(*recorded)
    old, new = pairs[0]
    # The larger p-value decides: a change must show with and without the CPU waits.
    slower = max(compare_runs(a, b) for a, b in pairs)
    faster = max(compare_runs(b, a) for a, b in pairs)
    shares = [_typical(b) / _typical(a) - 1 for a, b in pairs]
    phases, not_measurable = _phases(before, after)
    change = Change(name="step", before_ns=_typical(old), after_ns=_typical(new))
    return Comparison(
        step=change,
        p_value=faster if change.after_ns < change.before_ns else slower,
        detectable=_max_or_none([_detectable(a, b, min_change) for a, b in pairs]),
        steps=(sum(map(len, old)), sum(map(len, new))),
        runs=(len(old), len(new)),
        regression=slower < SIGNIFICANCE and min(shares) >= min_change,
        improvement=faster < SIGNIFICANCE and max(shares) <= -min_change,
        phases=phases,
        not_measurable=not_measurable,
        operators=_operators(before, after),
    )


def _series(old: Sequence[RecordedSteps], new: Sequence[RecordedSteps]) -> list[tuple[Runs, Runs]]:
    """Return the series that must all show B slower: wall times, and wall times minus CPU waits."""
    pairs: list[tuple[Runs, Runs]] = [([a.wall_ns for a in old], [b.wall_ns for b in new])]
    without_wait = [[run.without_cpu_wait_ns for run in runs] for runs in (old, new)]
    measured = [[times for times in runs if times is not None] for runs in without_wait]
    if measured == without_wait:
        pairs.append((measured[0], measured[1]))
    return pairs


def _typical(runs: Runs) -> float:
    """Return the geometric mean of the runs' median step times, in ns."""
    return float(np.exp(np.mean(np.log([np.median(run) for run in runs]))))


def _max_or_none(shares: Sequence[float | None]) -> float | None:
    """Return the largest share, or None if any share is missing."""
    numbers = [share for share in shares if share is not None]
    return max(numbers) if len(numbers) == len(shares) else None


def recorded_steps(
    folder: Path, *, on_problem: Callable[[str], None] = logger.warning
) -> RecordedSteps | None:
    """Return the step times in a run's event log.

    Steps slowed by the tracer are skipped, as are the warmup steps before its first window. Returns
    None if the folder is not a run, or has fewer than 4 such steps on all ranks.

    Args:
        folder: the run's folder.
        on_problem: called with a message about each part of the log that cannot be read.
    """
    if not (folder / "manifest.json").is_file():
        return None
    try:
        run = read_run(folder)
        event_filter = EventFilter(kinds={"step"})
        events = list(read_events(folder, event_filter, on_problem=on_problem))
    except ProfileError as error:
        on_problem(str(error))
        return None
    times: dict[int, dict[int, float]] = defaultdict(dict)
    waits: dict[int, dict[int, float]] = defaultdict(dict)
    for event in events:
        step_time_s, wait_s = event.fields.get("step_time_s"), event.fields.get("cpu_wait_s")
        is_regular = "traced" not in event.fields and (event.step or 0) >= run.schedule.skip
        if (
            event.step is not None
            and is_regular
            and isinstance(step_time_s, float)
            and 0 < step_time_s < MAX_STEP_S
        ):
            times[event.step][event.rank] = step_time_s * 1e9
            if isinstance(wait_s, float) and wait_s >= 0:
                waits[event.step][event.rank] = min(wait_s, step_time_s) * 1e9
    ranks = {rank for by_rank in times.values() for rank in by_rank}
    # A step that only some ranks logged would compare different sets of ranks.
    complete = [step for step, by_rank in sorted(times.items()) if len(by_rank) == len(ranks)]
    if len(complete) < MIN_STEPS:
        return None
    wall = np.array([max(times[step].values()) for step in complete])
    # All or none: a rank without a measured wait may have waited longest.
    counted = all(len(waits[step]) == len(ranks) for step in complete)
    cpu_wait = np.array([max(waits[step].values()) for step in complete]) if counted else None
    # At least 1% remains, as logarithms are taken of the difference.
    without_wait = None if cpu_wait is None else np.maximum(wall - cpu_wait, 0.01 * wall)
    return RecordedSteps(wall_ns=wall, without_cpu_wait_ns=without_wait)


def step_times(analysis: Analysis) -> Times:
    """Return the slowest rank's wall time of each step that all ranks recorded, (S,) ns.

    Raises:
        TraceError: there are fewer than 4 such steps.
    """
    times: dict[int, list[int]] = defaultdict(list)
    for rank in analysis.ranks.values():
        for breakdown in rank.breakdowns:
            if breakdown.step.number is not None and breakdown.step.duration_ns > 0:
                times[breakdown.step.number].append(breakdown.step.duration_ns)
    slowest = [
        max(durations)
        for _, durations in sorted(times.items())
        if len(durations) == len(analysis.ranks)
    ]
    if len(slowest) < MIN_STEPS:
        raise TraceError(
            f"comparing needs at least {MIN_STEPS} named steps per run, got {len(slowest)}; "
            "record more steps, and call the profiler's step()"
        )
    return np.array(slowest, np.float64)


def compare_runs(before: Runs, after: Runs, *, seed: int = 0) -> float:
    """Return the p-value (0 to 1) of the median step of `after` being larger than of `before`.

    Args:
        before: step times of each run of A, (N,) each, positive, in order.
        after: step times of each run of B.
        seed: seed of the draws from Student's distribution.
    """
    difference, error, freedom = _difference(before, after)
    if error == 0:
        return 0.0 if difference > 0 else 1.0
    draws = np.random.default_rng(seed).standard_t(freedom, DRAWS)
    # Adding 1 to both keeps the estimate above 0, as a Monte Carlo p-value must be.
    return float(((draws >= difference / error).sum() + 1) / (DRAWS + 1))


def _difference(before: Runs, after: Runs) -> tuple[float, float, float]:
    """Return the difference of log medians, its standard error, and the degrees of freedom."""
    if len(before) + len(after) > 2:
        return _between_runs(before, after)
    old, new = np.log(before[0]), np.log(after[0])
    deviations = [np.abs(times - np.median(times)) for times in (old, new)]
    # 1.4826 converts a median deviation to a standard deviation; two medians cost 2 degrees.
    freedom = max((len(old) + len(new)) / CORRELATED_STEPS - 2, 1.0)
    std = 1.4826 * float(np.median(np.concatenate(deviations))) * (1 + 1 / freedom)
    # The standard error of a median is 1.25 times the standard error of a mean.
    error = 1.25 * std * (CORRELATED_STEPS / len(old) + CORRELATED_STEPS / len(new)) ** 0.5
    # With one run of each, the variance between runs is assumed, once for A and once for B.
    error = (error**2 + 2 * RUN_STD**2) ** 0.5
    return float(np.median(new) - np.median(old)), error, freedom


def _between_runs(before: Runs, after: Runs) -> tuple[float, float, float]:
    """Return the same as `_difference` from the runs' medians and their pooled variance."""
    old, new = (np.array([np.log(np.median(run)) for run in runs]) for runs in (before, after))
    # Two-sample t test with pooled variance, on the logarithms of the runs' medians.
    freedom = len(old) + len(new) - 2
    squares = ((old - old.mean()) ** 2).sum() + ((new - new.mean()) ** 2).sum()
    error = float(squares / freedom * (1 / len(old) + 1 / len(new))) ** 0.5
    return float(new.mean() - old.mean()), error, float(freedom)


def _detectable(before: Runs, after: Runs, min_change: float) -> float | None:
    """Return the relative slowdown that is significant in 9 of 10 pairs of such runs."""
    _, error, freedom = _difference(before, after)
    draws = np.random.default_rng(0).standard_t(freedom, DRAWS)
    # The change must exceed the critical value in 90% of the runs: add both quantiles.
    critical, power_quantile = np.quantile(draws, [1 - SIGNIFICANCE, POWER])
    log_change = float(error * (critical + power_quantile))
    return max(float(np.expm1(log_change)), min_change) if log_change < np.log(10) else None


def _phases(before: Analysis, after: Analysis) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    """Compare the phases that both runs measured, and name the others."""

    def per_step(analysis: Analysis, phase: str) -> float | None:
        amounts = [
            step.phases_ns[phase]
            for rank in analysis.ranks.values()
            for step in rank.breakdowns
            if phase not in rank.activity.unmeasured
        ]
        return float(np.mean(amounts)) if amounts else None

    changes, missing = [], []
    for phase in PHASES:
        old, new = per_step(before, phase), per_step(after, phase)
        if old is None or new is None:
            missing.append(phase)
        elif old or new:
            changes.append(Change(name=phase, before_ns=old, after_ns=new))
    return tuple(changes), tuple(missing)


def _operators(before: Analysis, after: Analysis) -> tuple[Change, ...]:
    def per_step(analysis: Analysis) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        steps = 0
        for rank in analysis.ranks.values():
            steps += len(rank.breakdowns)
            for row in operator_table(rank.trace):
                if not row.name.startswith("ProfilerStep"):
                    sums[row.name] += row.self_ns
        return {name: total_ns / max(steps, 1) for name, total_ns in sums.items()}

    old, new = per_step(before), per_step(after)
    changes = [
        Change(name=name, before_ns=old.get(name, 0.0), after_ns=new.get(name, 0.0))
        for name in old.keys() | new.keys()
        if old.get(name) or new.get(name)
    ]
    return tuple(
        sorted(changes, key=lambda change: (-abs(change.after_ns - change.before_ns), change.name))
    )
