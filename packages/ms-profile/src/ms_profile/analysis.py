"""A whole run's traces put together: ranks on one clock, breakdowns, the ledger."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from attrs import evolve, field, frozen

from ms_profile.activity import Activity, Breakdown, break_down, find_activity
from ms_profile.alignment import ClockFit
from ms_profile.clocks import align_meetings, correct_intervals, shift_meeting
from ms_profile.collectives import Collective, Meeting, find_collectives, match_collectives
from ms_profile.errors import ProfileError, TraceError
from ms_profile.format import read_ranks
from ms_profile.grouping import split_groups
from ms_profile.intervals import Intervals
from ms_profile.ledger import Ledger, keep_ledger
from ms_profile.pauses import read_pauses
from ms_profile.steps import find_steps
from ms_profile.trace import Trace, read_trace

__all__ = ["Analysis", "RankAnalysis", "analyse", "analyse_traces", "find_traces"]

SUFFIXES = (".json", ".json.gz", ".pt.trace.json", ".pt.trace.json.gz")


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


@frozen(kw_only=True, eq=False)
class Analysis:
    """What the traces of a run show together."""

    ranks: dict[int, RankAnalysis]
    meetings: tuple[Meeting, ...]
    """On the clock of the lowest rank."""
    ledger: Ledger
    warnings: tuple[str, ...] = field(default=())


def analyse(path: str | os.PathLike[str]) -> Analysis:
    """Read and analyse a trace, a folder of traces, or the output folder of `ms-profile run`.

    Of a rank with several windows the last one is taken: the first may still warm up.

    Raises:
        TraceError: nothing there can be read as a trace.
    """
    files = find_traces(Path(path))
    traces: dict[int, Trace] = {}
    warnings: list[str] = []
    for file in files:
        try:
            trace = read_trace(file)
        except TraceError as error:
            if len(files) == 1:
                raise
            warnings.append(str(error))
            continue
        warnings += trace.warnings
        rank = trace.rank if trace.rank is not None else len(traces)
        traces[rank] = evolve(trace, rank=rank)
    if not traces:
        raise TraceError(f"{path} holds no readable trace: {'; '.join(warnings) or 'it is empty'}")
    pauses = {rank: read_pauses(Path(path), rank) for rank in traces}
    return analyse_traces(
        traces,
        garbage={rank: own.garbage for rank, own in pauses.items() if own is not None},
        data={rank: own.data for rank, own in pauses.items() if own is not None},
        warnings=warnings,
    )


def find_traces(path: Path) -> list[Path]:
    """Return the traces to read, by name: of a run's folder the ones that its ranks name.

    Raises:
        TraceError: there are none.
    """
    if path.is_file():
        return [path]
    if not path.exists():
        raise TraceError(f"there is no {path}; give a trace, or a folder of .json or .json.gz")
    try:
        named = [path / rank.traces[-1].path for rank in read_ranks(path) if rank.traces]
    except ProfileError:
        named = []
    found = [file for file in named if file.is_file()]
    is_run = (path / "manifest.json").is_file()
    if not found and not is_run:
        found = sorted(file for file in path.glob("*") if file.name.endswith(SUFFIXES))
    if not found and any((path / "traces").glob("*")):  # of ranks that could not report
        return _last_windows(find_traces(path / "traces"))
    if not found and is_run:
        raise TraceError(
            f"the run in {path} saved no window of traced steps: it was too short, or killed; its "
            f"steps are in `ms-profile logs {path}`, its last spans in `read_ring` of {path}/ring"
        )
    if not found:
        found = sorted(path.glob("**/ASCEND_PROFILER_OUTPUT/trace_view.json"))
    if not found:
        raise TraceError(f"{path} has no traces; give a trace, or a folder of .json or .json.gz")
    return found


def _last_windows(files: Sequence[Path]) -> list[Path]:
    """Of each rank's windows (`rank-00000.003.json`) the last one."""
    last = {file.name.split(".")[0]: file for file in files}
    return list(last.values())


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
        warnings: what reading the traces said.
    """
    said = list(warnings)
    hosts = {rank: trace.host for rank, trace in traces.items()}
    found = {rank: find_collectives(trace) for rank, trace in traces.items()}
    steps = {rank: find_steps(trace) for rank, trace in traces.items()}
    matched = split_groups(match_collectives(found, steps), hosts)
    fits = align_meetings(matched, hosts) if len(traces) > 1 else {}
    ranks = {}
    for rank, trace in sorted(traces.items()):
        activity = find_activity(trace, (garbage or {}).get(rank), (data or {}).get(rank))
        ranks[rank] = RankAnalysis(
            rank=rank, trace=trace, activity=activity, breakdowns=break_down(activity),
            collectives=found[rank], clock=fits.get(rank),
        )  # fmt: skip
    lost = sorted(ranks.keys() - fits.keys())
    if lost and len(ranks) > 1:
        said.append(
            f"ranks {', '.join(map(str, lost))} share no collectives with rank {min(ranks)}: "
            "their clocks cannot be compared, nor their waits be told from transfers"
        )
    meetings = tuple(shift_meeting(one, fits) for one in matched) if fits else ()
    phases = {
        rank: {
            name: correct_intervals(own, fits[rank])
            for name, own in one.activity.partition().items()
        }
        for rank, one in ranks.items()
        if rank in fits
    }
    # What is known of a rank from before its trace, its pauses, is less than what it did.
    begins = {
        rank: int(fits[rank].correct(np.array([one.trace.span_ns[0]]))[0])
        for rank, one in ranks.items()
        if rank in fits
    }
    ledger = keep_ledger(meetings, phases, begins)
    return Analysis(ranks=ranks, meetings=meetings, ledger=ledger, warnings=tuple(said))
