"""A whole run's traces put together: ranks on one clock, breakdowns, the ledger."""

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

import numpy as np
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from ms_profile.analysis.activity import Activity, Breakdown, break_down, find_activity
from ms_profile.analysis.collectives import (
    Collective,
    MatchedCollective,
    find_collectives,
    match_collectives,
)
from ms_profile.analysis.host_pauses import read_pauses
from ms_profile.analysis.inputs import RunDescription, describe_run, find_traces, latest_of_each
from ms_profile.analysis.ledger import Ledger, keep_ledger
from ms_profile.analysis.shared_clock import align_collectives, shift_collective
from ms_profile.analysis.unnamed_groups import split_groups
from ms_profile.clocks.alignment import ClockFit
from ms_profile.errors import ProfileError, TraceError
from ms_profile.files.untrusted import check_path, decoding
from ms_profile.log.ring import is_ring, read_ring
from ms_profile.trace.columns import Trace
from ms_profile.trace.from_ring import trace_of_ring
from ms_profile.trace.intervals import Intervals
from ms_profile.trace.reader import read_trace
from ms_profile.vendors.category import Category

WORKER = re.compile(r"(?P<name>.+)\.[0-9]{10,}\.pt\.trace\.json(\.gz)?", re.IGNORECASE)
"""A name that `torch.profiler.tensorboard_trace_handler` gives: worker, time, suffix."""


@frozen(kw_only=True, eq=False)
class RankAnalysis:
    """What one rank's trace shows; instants on the rank's own clock."""

    rank: int
    trace: Trace
    activity: Activity
    breakdowns: tuple[Breakdown, ...]
    collectives: tuple[Collective, ...]
    clock: ClockFit | None
    """None where the rank's clock could not be put on the reference's."""

    @property
    def wall_ns(self) -> int:
        """Wall time of the recorded steps."""
        return sum(step.step.duration_ns for step in self.breakdowns)

    def phase_ns(self, phase: str) -> int:
        """Return the time of the recorded steps in one phase of `PHASES`."""
        return sum(step.phases_ns[phase] for step in self.breakdowns)

    def on_common_clock(self, instants_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Put instants (N,) ns of this rank on the lowest rank's clock, if that is known."""
        return instants_ns if self.clock is None else self.clock.correct(instants_ns)

    def common_ns(self, instant_ns: int) -> int:
        """Put one instant (ns) on the lowest rank's clock, as `on_common_clock` does."""
        return int(self.on_common_clock(np.array([instant_ns], np.int64))[0])


@frozen(kw_only=True, eq=False)
class Analysis:
    """What the traces of a run show together."""

    ranks: dict[int, RankAnalysis]
    matched: tuple[MatchedCollective, ...]
    """On the clock of the lowest rank."""
    ledger: Ledger
    warnings: tuple[str, ...] = field(default=())
    run: RunDescription | None = field(default=None)
    """What was run; None where the traces were given one by one."""


def analyse(path: str | os.PathLike[str], *, window: int | None = None) -> Analysis:
    """Read and analyse a trace, a recorder's ring, a folder of either, or a run's output folder.

    Where a rank has several windows, the last one is taken, or the one asked for.

    Args:
        path: what to read.
        window: of a run's folder, which window of traced steps, counted from 1.

    Raises:
        TraceError: nothing there can be read as a trace.
    """
    check_path("a run", path, error=TraceError)
    place = Path(path)
    with decoding(place, error=TraceError):
        found = find_traces(place, window=window)
    traces, warnings = _read_all(found.files)
    if not traces:
        raise TraceError(f"{path} holds no readable trace: {'; '.join(warnings) or 'it is empty'}")
    pauses = {rank: read_pauses(place, rank, on_problem=warnings.append) for rank in traces}
    run = describe_run(place, window=window, on_problem=warnings.append)
    analysis = analyse_traces(
        traces,
        garbage={rank: own.garbage for rank, own in pauses.items() if own is not None},
        data={rank: own.data for rank, own in pauses.items() if own is not None},
        warnings=(*found.warnings, *warnings),
    )
    return evolve(analysis, run=run)


def _read_all(files: Sequence[Path]) -> tuple[dict[int, Trace], list[str]]:
    """Return the traces by rank, and what could not be read or used of the files.

    Raises:
        TraceError: the only file is no trace.
    """
    traces: dict[Path, Trace] = {}
    warnings: list[str] = []
    for file in files:
        try:
            traces[file] = _read_one(file)
        except ProfileError as error:
            if len(files) == 1:
                raise
            warnings.append(str(error))
    ranks = {file: trace.rank for file, trace in traces.items() if trace.rank is not None}
    taken = set(ranks.values())
    free = (rank for rank in count() if rank not in taken)
    for files_of_process in _by_process(
        {file: trace for file, trace in traces.items() if trace.rank is None}
    ):
        ranks |= dict.fromkeys(files_of_process, next(free))
    claims = [(ranks[file], file, trace.span_ns[0]) for file, trace in traces.items()]
    left_out, problems = latest_of_each(claims)
    warnings += problems
    by_rank: dict[int, Trace] = {}
    for file, trace in traces.items():
        if file not in left_out:
            warnings += trace.warnings
            by_rank[ranks[file]] = evolve(trace, rank=ranks[file])
    return by_rank, warnings


def _by_process(traces: Mapping[Path, Trace]) -> list[list[Path]]:
    """Group traces that name no rank by the process that wrote them, in order of the files.

    A profiler with `repeat` writes a file for each cycle. Two files are cycles of one process if
    they agree on its name and number and one ends before the other begins; ranks of a run record
    the same steps at the same time.
    """
    groups: dict[Path, list[Path]] = {}
    last: dict[tuple[str, str, int | str | None], list[Path]] = defaultdict(list)
    for file, trace in sorted(traces.items(), key=lambda each: each[1].span_ns[0]):
        worker = WORKER.fullmatch(file.name)
        key = (worker["name"] if worker else "", trace.host, _process_of(trace))
        before = next(
            (each for each in last[key] if traces[each].span_ns[1] <= trace.span_ns[0]), None
        )
        # Without a worker's name, a number of a process and nothing else is no proof.
        if before is None or not (worker or trace.host):
            groups[file] = [file]
        else:
            last[key].remove(before)
            groups[file] = [*groups.pop(before), file]
        last[key].append(file)
    return sorted(groups.values(), key=min)


def _process_of(trace: Trace) -> int | str | None:
    """Return the number of the process that has most of a trace's spans on the host."""
    rows = trace.rows(Category.OPERATOR, Category.ANNOTATION)
    if not len(rows):
        return None
    thread = int(np.bincount(trace.thread[rows]).argmax())
    return trace.threads[thread].process


def _read_one(file: Path) -> Trace:
    if is_ring(file):
        size = file.stat().st_size
        return trace_of_ring(read_ring(file), file_bytes=size, name=file.name)
    trace = read_trace(file)
    if trace.is_export:
        raise TraceError(
            f"{file} holds all ranks, exported for Perfetto, and is left out; give the traces that "
            "it was made from"
        )
    return trace


def analyse_traces(
    traces: Mapping[int, Trace],
    *,
    garbage: Mapping[int, Intervals] | None = None,
    data: Mapping[int, Intervals] | None = None,
    warnings: Sequence[str] = (),
) -> Analysis:
    """Analyse traces by rank.

    Args:
        traces: by rank.
        garbage: intervals (N, 2) ns of garbage collection known from elsewhere, on each rank's own
            wall clock.
        data: likewise, of waits for the next batch.
        warnings: what went wrong while the traces were read, one sentence each.
    """
    hosts = {rank: trace.host for rank, trace in traces.items()}
    found = {rank: find_collectives(trace) for rank, trace in traces.items()}
    activities = {
        rank: find_activity(trace, (garbage or {}).get(rank), (data or {}).get(rank))
        for rank, trace in sorted(traces.items())
    }
    steps = {rank: activity.steps for rank, activity in activities.items()}
    matched = split_groups(match_collectives(found, steps), hosts)
    fits = align_collectives(matched, hosts) if len(traces) > 1 else {}
    ranks = {
        rank: RankAnalysis(
            rank=rank, trace=traces[rank], activity=activity, breakdowns=break_down(activity),
            collectives=found[rank], clock=fits.get(rank),
        )
        for rank, activity in activities.items()
    }  # fmt: skip
    aligned = {rank: one for rank, one in ranks.items() if one.clock is not None}
    lost = sorted(ranks.keys() - aligned.keys())
    if lost and len(ranks) > 1:
        warnings = (
            *warnings,
            f"ranks {', '.join(map(str, lost))} share no collectives with rank {min(ranks)}: "
            "their clocks cannot be compared, nor their waits be separated from transfers",
        )
    phases = {
        rank: {
            name: one.on_common_clock(own.reshape(-1)).reshape(-1, 2)
            for name, own in one.activity.parts.items()
        }
        for rank, one in aligned.items()
    }
    # What is known of a rank from before its trace, its pauses, is less than what it did.
    begins = {rank: one.common_ns(one.trace.span_ns[0]) for rank, one in aligned.items()}
    matched = tuple(shift_collective(one, fits) for one in matched) if fits else ()
    ledger = keep_ledger(matched, phases, begins)
    return Analysis(ranks=ranks, matched=matched, ledger=ledger, warnings=tuple(warnings))
