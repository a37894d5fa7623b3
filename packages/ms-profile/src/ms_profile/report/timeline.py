"""Pack every rank's spans into the page's columns, by track, with delta-encoded starts."""

from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ms_profile.analysis.activity import DATA
from ms_profile.analysis.activity import GARBAGE as GARBAGE_SPAN
from ms_profile.analysis.whole_run import Analysis, RankAnalysis
from ms_profile.trace.columns import Thread
from ms_profile.trace.intervals import clip
from ms_profile.vendors.category import Category

DATA_WAIT = len(Category)
"""Category used only on the page: a scope that waits for the next batch."""
GARBAGE = len(Category) + 1
"""Category used only on the page: a garbage collection from the recorder."""
RECORDER = 0xFFFFFF
"""Thread id of the recorder's track."""
GARBAGE_NAME = "garbage collection"
DEVICE = [int(c) for c in (Category.KERNEL, Category.COPY, Category.DEVICE_ANNOTATION,
                           Category.DEVICE_WAIT)]  # fmt: skip
SHOWN = [int(c) for c in Category if c not in (Category.OTHER, Category.OVERHEAD)]


@frozen(kw_only=True, eq=False)
class Timeline:
    """Data for the page's timeline."""

    layout: dict[str, Any]
    """Origin, unit, tracks, names, steps, and the numbers of spans in total and shown."""
    columns: dict[str, NDArray[Any]]
    """`start` (difference from the track's previous start), `duration`, `name`, `category`."""


def build_timeline(analysis: Analysis, *, max_events: int = 1_000_000) -> Timeline:
    """Convert all ranks to one clock and keep the longest `max_events` spans."""
    origins = _origins(analysis)
    parts = [_rank_spans(rank, index) for index, rank in enumerate(analysis.ranks.values())]
    for part, rank in zip(parts, analysis.ranks.values(), strict=True):
        part["start"] = part["start"] - origins[rank.rank]
    if not any(len(part["start"]) for part in parts):
        empty = {"tracks": [], "names": [], "unit_ns": 10, "total": 0, "shown": 0, "length": 0,
                   "origin_ns": "0", "origins": {}, "steps": []}  # fmt: skip
        return Timeline(layout=empty, columns={})
    names: dict[str, int] = {}
    for part, rank in zip(parts, analysis.ranks.values(), strict=True):
        local_names = (*rank.trace.names, GARBAGE_NAME)
        table = np.array([names.setdefault(n, len(names)) for n in local_names], np.int64)
        # From ids of the rank's table of names to ids of the page's table.
        part["name"] = table[part["name"]]
    columns = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    total = len(columns["start"])
    if total > max_events:
        # The longest spans, in their previous order.
        keep = np.sort(np.argpartition(-columns["duration"], max_events)[:max_events])
        columns = {key: column[keep] for key, column in columns.items()}
    tracks, columns = _order(columns, analysis)
    return _finish(analysis, columns, tracks, list(names), origins, total)


def _origins(analysis: Analysis) -> dict[int, int]:
    """Return the start of each rank's timeline in ns.

    Ranks on a common clock share their origin; a rank with an unaligned clock starts at its own
    first span.
    """
    first_ns = {
        rank: result.common_ns(result.trace.span_ns[0]) for rank, result in analysis.ranks.items()
    }
    aligned = [
        first_ns[rank] for rank, result in analysis.ranks.items() if result.clock is not None
    ]
    common = min(aligned, default=0)
    return {
        rank: first_ns[rank] if result.clock is None else common
        for rank, result in analysis.ranks.items()
    }


def _rank_spans(rank: RankAnalysis, index: int) -> dict[str, NDArray[Any]]:
    trace = rank.trace
    category = trace.category.astype(np.int64)
    category[trace.named(DATA, Category.ANNOTATION)] = DATA_WAIT
    category[trace.named(GARBAGE_SPAN, Category.ANNOTATION)] = GARBAGE
    rows = np.flatnonzero(np.isin(trace.category, SHOWN))
    start = rank.on_common_clock(trace.start_ns[rows])
    return _with_garbage(rank, index, {
        "start": start,
        "duration": rank.on_common_clock(trace.end_ns[rows]) - start,
        "name": trace.name[rows].astype(np.int64),
        "category": category[rows],
        # The upper bits of a track id are the rank's index, the lower 24 its thread.
        "track": trace.thread[rows].astype(np.int64) + (index << 24),
    })  # fmt: skip


def _with_garbage(
    rank: RankAnalysis, index: int, spans: dict[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Add the garbage collections that only the recorder saw, on a separate track."""
    first, last = rank.trace.span_ns
    pauses = clip(rank.activity.known_garbage, first, last)
    if not len(pauses):
        return spans
    start = rank.on_common_clock(pauses[:, 0])
    extra = {
        "start": start,
        "duration": rank.on_common_clock(pauses[:, 1]) - start,
        "name": np.full(len(pauses), len(rank.trace.names)),
        "category": np.full(len(pauses), GARBAGE),
        "track": np.full(len(pauses), RECORDER + (index << 24)),
    }
    return {key: np.concatenate([column, extra[key]]) for key, column in spans.items()}


def _order(
    columns: dict[str, NDArray[Any]], analysis: Analysis
) -> tuple[list[dict[str, Any]], dict[str, NDArray[Any]]]:
    """Sort by rank, track, start, and longest first; return the tracks and sorted columns."""
    codes, track, counts = np.unique(columns["track"], return_inverse=True, return_counts=True)
    # (tracks,): whether any span of the track ran on a device.
    on_device = np.bincount(track, np.isin(columns["category"], DEVICE), len(codes)) > 0
    # Per rank: host threads by number of spans, then device streams.
    order = np.lexsort((-counts, on_device, codes >> 24))
    position = np.empty(len(codes), np.int64)
    position[order] = np.arange(len(codes))
    codes, counts = codes[order], counts[order]
    first = np.cumsum(counts) - counts
    rows = np.lexsort((-columns["duration"], columns["start"], position[track]))
    columns = {key: column[rows] for key, column in columns.items()}
    ranks = list(analysis.ranks.values())
    tracks = []
    for code, begin, count in zip(codes.tolist(), first.tolist(), counts.tolist(), strict=True):
        rank = ranks[code >> 24]
        if code & 0xFFFFFF == RECORDER:
            thread = Thread(process="recorder", thread=0, name=GARBAGE_NAME)
        else:
            thread = rank.trace.threads[code & 0xFFFFFF]
        thread_name = thread.name or f"thread {thread.thread}"
        process = thread.process_name or str(thread.process)
        tracks.append(
            {
                "rank": rank.rank,
                "name": thread_name,
                "process": process,
                "first": begin,
                "count": count,
            }
        )
    return tracks, columns


def _finish(
    analysis: Analysis,
    columns: dict[str, NDArray[Any]],
    tracks: list[dict[str, Any]],
    names: list[str],
    origins: dict[int, int],
    total: int,
) -> Timeline:
    start = columns["start"]
    first = np.array([track["first"] for track in tracks])
    longest = max(int(start.max()), int(columns["duration"].max()))
    # Ticks of 10 ns, or coarser until every time fits into 31 bits.
    unit = 10
    while longest // unit >= 1 << 31:
        unit *= 10
    ticks = start // unit
    # Small differences compress well; every track starts again from the origin.
    distance = np.diff(ticks, prepend=0)
    distance[first] = ticks[first]
    steps = []
    for rank in analysis.ranks.values():
        for step in rank.activity.steps:
            edges = rank.on_common_clock(np.array([step.start_ns, step.end_ns]))
            ticks_of = (edges - origins[rank.rank]) // unit
            steps.append([rank.rank, step.number, *ticks_of.tolist()])
    layout = {
        "origin_ns": str(min(origins.values())),
        "origins": {str(rank): str(origin) for rank, origin in origins.items()},
        "unit_ns": unit, "tracks": tracks, "names": names,
        "total": total, "shown": len(start), "steps": steps,
        "length": int((start + columns["duration"]).max()) // unit + 1,
    }  # fmt: skip
    return Timeline(
        layout=layout,
        columns={
            "start": distance,
            # Both round down, so that no span overlaps the next one.
            "duration": columns["duration"] // unit,
            "name": columns["name"],
            "category": columns["category"],
        },
    )
