"""Every rank's spans as the page's columns: by track, each start as the distance to the last."""

from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ms_profile.activity import DATA
from ms_profile.analysis import Analysis, RankAnalysis
from ms_profile.trace.columns import Category

__all__ = ["Timeline", "build_timeline"]

DATA_WAIT = len(Category)
"""On the page alone: a scope that waits for the next batch."""
DEVICE = [int(c) for c in (Category.KERNEL, Category.COPY, Category.DEVICE_ANNOTATION,
                           Category.DEVICE_WAIT)]  # fmt: skip
UNITS_NS = (10, 100, 1000, 10_000, 100_000, 1_000_000)
SHOWN = [int(c) for c in Category if c not in (Category.OTHER, Category.OVERHEAD)]


@frozen(kw_only=True, eq=False)
class Timeline:
    """What the page draws."""

    facts: dict[str, Any]
    """Origin, unit, tracks, names, steps and how much was left out."""
    columns: dict[str, NDArray[Any]]
    """`start` (distance to the track's last start), `duration`, `name`, `category`."""


def build_timeline(analysis: Analysis, *, most_events: int = 1_000_000) -> Timeline:
    """Put all ranks on one clock and keep the longest `most_events` spans."""
    parts = [_rank_spans(rank, place) for place, rank in enumerate(analysis.ranks.values())]
    if not any(len(part["start"]) for part in parts):
        return Timeline(facts={"tracks": [], "names": [], "unit_ns": 10, "total": 0, "shown": 0,
                               "origin_ns": 0, "length": 0, "steps": []}, columns={})  # fmt: skip
    names: dict[str, int] = {}
    for part, rank in zip(parts, analysis.ranks.values(), strict=True):
        table = np.array([names.setdefault(n, len(names)) for n in rank.trace.names], np.int64)
        part["name"] = table[part["name"]]
    columns = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    total = len(columns["start"])
    if total > most_events:
        keep = np.sort(np.argpartition(-columns["duration"], most_events)[:most_events])
        columns = {key: column[keep] for key, column in columns.items()}
    origin = int(columns["start"].min())
    tracks, columns = _order(columns, analysis)
    return _finish(analysis, columns, tracks, list(names), origin, total)


def _rank_spans(rank: RankAnalysis, place: int) -> dict[str, NDArray[Any]]:
    trace = rank.trace
    rows = np.flatnonzero(np.isin(trace.category, SHOWN))
    start, end = trace.start_ns[rows], trace.end_ns[rows]
    if rank.clock is not None:
        start, end = rank.clock.correct(start), rank.clock.correct(end)
    waits = np.array([DATA.match(name) is not None for name in trace.names] or [False])
    category = trace.category[rows].astype(np.int64)
    category[(category == Category.ANNOTATION) & waits[trace.name[rows]]] = DATA_WAIT
    return {
        "start": start,
        "duration": end - start,
        "name": trace.name[rows].astype(np.int64),
        "category": category,
        "track": trace.thread[rows].astype(np.int64) + (place << 24),
    }


def _order(
    columns: dict[str, NDArray[Any]], analysis: Analysis
) -> tuple[list[dict[str, Any]], dict[str, NDArray[Any]]]:
    """Sort by rank, track, start, longest first; describe the tracks."""
    codes, track, counts = np.unique(columns["track"], return_inverse=True, return_counts=True)
    on_device = np.bincount(track, np.isin(columns["category"], DEVICE), len(codes)) > 0
    # Of each rank the busiest thread of the host first, then the others, then devices' streams.
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
        thread = rank.trace.threads[code & 0xFFFFFF]
        shown = thread.name or f"thread {thread.thread}"
        process = thread.process_name or str(thread.process)
        tracks.append(
            {"rank": rank.rank, "name": shown, "process": process, "first": begin, "count": count}
        )
    return tracks, columns


def _finish(
    analysis: Analysis,
    columns: dict[str, NDArray[Any]],
    tracks: list[dict[str, Any]],
    names: list[str],
    origin: int,
    total: int,
) -> Timeline:
    start = columns["start"] - origin
    first = np.array([track["first"] for track in tracks])
    longest = max(int(start.max()), int(columns["duration"].max()))
    unit = next(unit for unit in UNITS_NS if longest // unit < 1 << 31)
    ticks = start // unit
    distance = np.diff(ticks, prepend=0)
    distance[first] = ticks[first]
    steps = []
    for rank in analysis.ranks.values():
        for step in rank.activity.steps:
            begin, end = np.array([step.start_ns]), np.array([step.end_ns])
            if rank.clock is not None:
                begin, end = rank.clock.correct(begin), rank.clock.correct(end)
            steps.append([rank.rank, step.number, int(begin[0] - origin) // unit,
                          int(end[0] - origin) // unit])  # fmt: skip
    facts = {
        "origin_ns": str(origin), "unit_ns": unit, "tracks": tracks, "names": names,
        "total": total, "shown": len(start), "steps": steps,
        "length": int((start + columns["duration"]).max()) // unit + 1,
    }  # fmt: skip
    return Timeline(
        facts=facts,
        columns={
            "start": distance,
            # Both are rounded down, so that no span runs into the next.
            "duration": columns["duration"] // unit,
            "name": columns["name"],
            "category": columns["category"],
        },
    )
