"""Analyze all traces of a run: ranks on one clock, breakdowns of their time, waiting ledger."""

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
from ms_profile.analysis.ledger import Ledger, build_ledger
from ms_profile.analysis.shared_clock import align_collectives, shift_collective
from ms_profile.analysis.unnamed_groups import split_groups
from ms_profile.arguments import check_items, check_type
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
"""File names given by `torch.profiler.tensorboard_trace_handler`: worker, time, suffix."""


@frozen(kw_only=True, eq=False)
class RankAnalysis:
    """Analysis of one rank; times on the rank's own clock."""

    rank: int
    trace: Trace
    activity: Activity
    breakdowns: tuple[Breakdown, ...]
    collectives: tuple[Collective, ...]
    clock: ClockFit | None
    """Alignment with the reference clock; None if it could not be determined."""

    @property
    def wall_ns(self) -> int:
        """Wall time of the recorded steps in ns."""
        return sum(step.step.duration_ns for step in self.breakdowns)

    def phase_ns(self, phase: str) -> int:
        """Return the time spent in one phase of `PHASES` during the recorded steps, in ns."""
        return sum(step.phases_ns[phase] for step in self.breakdowns)

    def on_common_clock(self, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert times (N,) ns of this rank to the lowest rank's clock, if it is aligned."""
        return times_ns if self.clock is None else self.clock.correct(times_ns)

    def common_ns(self, time_ns: int) -> int:
        """Convert one time in ns to the lowest rank's clock, as `on_common_clock` does."""
        return int(self.on_common_clock(np.array([time_ns], np.int64))[0])


@frozen(kw_only=True, eq=False)
class Analysis:
    """Analysis of a run."""

    ranks: dict[int, RankAnalysis]
    matched: tuple[MatchedCollective, ...]
    """Collectives that several ranks took part in, on the clock of the lowest rank."""
    ledger: Ledger
    warnings: tuple[str, ...] = field(default=())
    run: RunDescription | None = field(default=None)
    """Description of the run; None if the traces were passed individually."""


def analyse(path: str | os.PathLike[str], *, window: int | None = None) -> Analysis:
    """Analyze a trace, a recorder's ring, a folder of either, or a run's output folder.

    Args:
        path: file or folder to read.
        window: window of traced steps in a run's folder, counted from 1. None: the last one of
            every rank.

    Raises:
        TraceError: there is nothing that can be read as a trace.
    """
    check_path("a run", path, error=TraceError)
    source = Path(path)
    with decoding(source, error=TraceError):
        inputs = find_traces(source, window=window)
    traces, warnings = _read_traces(inputs.files)
    if not traces:
        raise TraceError(f"{path} has no readable trace: {'; '.join(warnings) or 'it is empty'}")
    pauses = {rank: read_pauses(source, rank, on_problem=warnings.append) for rank in traces}
    run = describe_run(source, window=window, on_problem=warnings.append)
    analysis = analyse_traces(
        traces,
        garbage={
            rank: rank_pauses.garbage
            for rank, rank_pauses in pauses.items()
            if rank_pauses is not None
        },
        data={
            rank: rank_pauses.data
            for rank, rank_pauses in pauses.items()
            if rank_pauses is not None
        },
        warnings=(*inputs.warnings, *warnings),
    )
    return evolve(analysis, run=run)


def _read_traces(files: Sequence[Path]) -> tuple[dict[int, Trace], list[str]]:
    """Return the traces by rank, and warnings about files that could not be read or used.

    Raises:
        TraceError: the only file is not a trace.
    """
    traces: dict[Path, Trace] = {}
    warnings: list[str] = []
    for file in files:
        try:
            traces[file] = _read_file(file)
        except ProfileError as error:
            if len(files) == 1:
                raise
            warnings.append(str(error))
    ranks = {file: trace.rank for file, trace in traces.items() if trace.rank is not None}
    used_ranks = set(ranks.values())
    free_ranks = (rank for rank in count() if rank not in used_ranks)
    # Traces that name no rank get the unused rank numbers, one per process.
    for files_of_process in _by_process(
        {file: trace for file, trace in traces.items() if trace.rank is None}
    ):
        ranks |= dict.fromkeys(files_of_process, next(free_ranks))
    claims = [(ranks[file], file, trace.span_ns[0]) for file, trace in traces.items()]
    ignored, problems = latest_of_each(claims)
    warnings += problems
    by_rank: dict[int, Trace] = {}
    for file, trace in traces.items():
        if file not in ignored:
            warnings += trace.warnings
            by_rank[ranks[file]] = evolve(trace, rank=ranks[file])
    return by_rank, warnings


def _by_process(traces: Mapping[Path, Trace]) -> list[list[Path]]:
    """Group traces that name no rank by the process that wrote them, in file order.

    A profiler with `repeat` writes one file per cycle. Two files are cycles of one process if they
    have the same worker and process id and one ends before the other starts; different ranks record
    the same steps at the same time.
    """
    groups: dict[Path, list[Path]] = {}
    last: dict[tuple[str, str, int | str | None], list[Path]] = defaultdict(list)
    for file, trace in sorted(traces.items(), key=lambda item: item[1].span_ns[0]):
        worker = WORKER.fullmatch(file.name)
        key = (worker["name"] if worker else "", trace.host, _process_of(trace))
        previous = next(
            (path for path in last[key] if traces[path].span_ns[1] <= trace.span_ns[0]), None
        )
        # A process id alone, without worker or host name, does not identify the process.
        if previous is None or not (worker or trace.host):
            groups[file] = [file]
        else:
            last[key].remove(previous)
            groups[file] = [*groups.pop(previous), file]
        last[key].append(file)
    return sorted(groups.values(), key=min)


def _process_of(trace: Trace) -> int | str | None:
    """Return the id of the process with most spans on the host."""
    rows = trace.rows(Category.OPERATOR, Category.ANNOTATION)
    if not len(rows):
        return None
    thread = int(np.bincount(trace.thread[rows]).argmax())
    return trace.threads[thread].process


def _read_file(file: Path) -> Trace:
    if is_ring(file):
        size = file.stat().st_size
        return trace_of_ring(read_ring(file), file_bytes=size, name=file.name)
    trace = read_trace(file)
    if trace.is_export:
        raise TraceError(
            f"{file} is an export for Perfetto with all ranks and is skipped; pass the traces that "
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
    """Analyze the traces of a run.

    Args:
        traces: trace of each rank.
        garbage: garbage collections of each rank from its recorder, intervals (N, 2) ns on the
            rank's wall clock.
        data: waits for the next batch of each rank, in the same form.
        warnings: problems in reading the traces, one sentence each.

    Raises:
        TraceError: an argument has the wrong type.
    """
    check_type("traces", traces, Mapping, "a dict of a Trace by rank", error=TraceError)
    check_items("traces.values()", traces.values(), Trace, "traces", error=TraceError)
    for name, intervals in (("garbage", garbage), ("data", data)):
        description = "a dict of intervals by rank"
        check_type(name, intervals, Mapping, description, error=TraceError, optional=True)
    hosts = {rank: trace.host for rank, trace in traces.items()}
    collectives = {rank: find_collectives(trace) for rank, trace in traces.items()}
    activities = {
        rank: find_activity(trace, (garbage or {}).get(rank), (data or {}).get(rank))
        for rank, trace in sorted(traces.items())
    }
    steps = {rank: activity.steps for rank, activity in activities.items()}
    # Groups are split before the alignment: a collective of several groups would tie together
    # clocks of ranks that did not wait for each other.
    matched = split_groups(match_collectives(collectives, steps), hosts)
    fits = align_collectives(matched, hosts) if len(traces) > 1 else {}
    ranks = {
        rank: RankAnalysis(
            rank=rank, trace=traces[rank], activity=activity, breakdowns=break_down(activity),
            collectives=collectives[rank], clock=fits.get(rank),
        )
        for rank, activity in activities.items()
    }  # fmt: skip
    aligned = {rank: result for rank, result in ranks.items() if result.clock is not None}
    unaligned = sorted(ranks.keys() - aligned.keys())
    if unaligned and len(ranks) > 1:
        warnings = (
            *warnings,
            f"ranks {', '.join(map(str, unaligned))} share no collectives with rank {min(ranks)}: "
            "their clocks cannot be compared, nor can waits be separated from transfers",
        )
    phases = {
        rank: {
            # (N, 2) to (2N,) and back, as clocks correct one dimension.
            name: result.on_common_clock(intervals.reshape(-1)).reshape(-1, 2)
            for name, intervals in result.activity.parts.items()
        }
        for rank, result in aligned.items()
    }
    # Before its trace, only the pauses of a rank are known, so causes are sought after its start.
    trace_starts = {
        rank: result.common_ns(result.trace.span_ns[0]) for rank, result in aligned.items()
    }
    matched = tuple(shift_collective(item, fits) for item in matched) if fits else ()
    ledger = build_ledger(matched, phases, trace_starts)
    return Analysis(ranks=ranks, matched=matched, ledger=ledger, warnings=tuple(warnings))
