"""Collectives of each rank, and which of them are the same one seen by several ranks."""

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Final

import numpy as np
from attrs import evolve, frozen

from ms_profile.trace.columns import Trace
from ms_profile.trace.messages import element_bytes
from ms_profile.trace.steps import Step
from ms_profile.vendors.category import Category

KINDS: Final = (
    ("all_reduce", re.compile(r"all_?reduce", re.IGNORECASE)),
    ("reduce_scatter", re.compile(r"reduce_?scatter", re.IGNORECASE)),
    ("all_gather", re.compile(r"all_?gather", re.IGNORECASE)),
    ("all_to_all", re.compile(r"all_?to_?all", re.IGNORECASE)),
    ("broadcast", re.compile(r"broadcast", re.IGNORECASE)),
    ("barrier", re.compile(r"barrier", re.IGNORECASE)),
    ("send_receive", re.compile(r"send_?recv", re.IGNORECASE)),
    ("send", re.compile(r"send", re.IGNORECASE)),
    ("receive", re.compile(r"recv|receive", re.IGNORECASE)),
    ("gather", re.compile(r"gather", re.IGNORECASE)),
    ("scatter", re.compile(r"scatter", re.IGNORECASE)),
    ("reduce", re.compile(r"reduce", re.IGNORECASE)),
)
MOST_BYTES: Final = 1 << 52
POINT_TO_POINT: Final = frozenset({"send", "receive", "send_receive"})


@frozen(kw_only=True)
class Collective:
    """One rank's part in one collective."""

    row: int
    kind: str
    group: str
    """The process group's name; empty where the backend gives none."""
    ranks: tuple[int, ...]
    """The group's members; empty where the profiler lists none."""
    size_bytes: int | None
    """Size of this rank's message; None where shapes were not recorded."""
    start_ns: int
    end_ns: int


@frozen(kw_only=True)
class MatchedCollective:
    """One collective as the ranks saw it; instants in ns of one common clock."""

    key: Hashable
    kind: str
    group: str
    size_bytes: int | None
    starts_ns: dict[int, int]
    ends_ns: dict[int, int]
    rows: dict[int, int]


def kind_of(name: str) -> str:
    """Name the collective in a kernel's or scope's name; "other" where it shows none."""
    for kind, pattern in KINDS:
        if pattern.search(name):
            return kind
    return "other"


def find_collectives(trace: Trace) -> tuple[Collective, ...]:
    """Return the collectives of a trace in order of their start."""
    kinds: dict[int, str] = {}
    found = []
    rows = trace.rows(Category.COLLECTIVE)
    for row in rows[np.argsort(trace.start_ns[rows], kind="stable")].tolist():
        code = int(trace.name[row])
        note = trace.notes.get(row)
        if code not in kinds:
            kinds[code] = kind_of(trace.names[code])
        kind = kinds[code]
        if note is not None and note.kind:
            kind = kind_of(note.kind)
        width = element_bytes(note.dtype) if note else None
        found.append(
            Collective(
                row=row,
                kind=kind,
                group=note.group if note else "",
                ranks=note.ranks if note else (),
                size_bytes=_size(note.sent_elements * width) if note and width else None,
                start_ns=int(trace.start_ns[row]),
                end_ns=int(trace.start_ns[row] + trace.duration_ns[row]),
            )
        )
    return tuple(found)


def _size(size_bytes: int) -> int | None:
    return size_bytes if 0 <= size_bytes <= MOST_BYTES else None


def match_collectives(
    found: Mapping[int, Sequence[Collective]], steps: Mapping[int, Sequence[Step]]
) -> tuple[MatchedCollective, ...]:
    """Pair the collectives of several ranks: the n-th of its kind, group and size on each.

    Where ranks saw unequal numbers, those of a step pair if they are equal in number there.
    Point-to-point messages don't name their peer in a trace; they pair where two ranks ran.
    """
    unnamed = {one.kind for own in found.values() for one in own if not one.group}
    series: dict[Hashable, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in found.items():
        for one in own:
            if one.kind in unnamed:  # a group that only some ranks name would tear them apart
                one = evolve(one, group="", ranks=())
            kind = one.kind
            if kind in POINT_TO_POINT:
                if len(found) != 2:
                    continue
                kind = "send_receive"
            series[kind, one.group, one.ranks, one.size_bytes][rank].append(one)
    matched: list[MatchedCollective] = []
    for signature, by_rank in series.items():
        if len(by_rank) < 2:
            continue
        if len({len(own) for own in by_rank.values()}) == 1:
            matched += _match(signature, by_rank)
            continue
        by_step: dict[Hashable, dict[int, list[Collective]]] = defaultdict(dict)
        for rank, own in by_rank.items():
            for one in own:
                by_step[_step_of(one, steps[rank])].setdefault(rank, []).append(one)
        for step, parts in by_step.items():
            if step is not None and len({len(own) for own in parts.values()}) == 1:
                matched += _match((signature, step), parts)
    return tuple(sorted(matched, key=lambda one: max(one.starts_ns.values())))


def _match(signature: Hashable, by_rank: Mapping[int, list[Collective]]) -> list[MatchedCollective]:
    ranks = sorted(by_rank)
    return [
        MatchedCollective(
            key=(signature, number),
            kind=parts[0].kind,
            group=parts[0].group,
            size_bytes=parts[0].size_bytes,
            starts_ns={r: part.start_ns for r, part in zip(ranks, parts, strict=True)},
            ends_ns={r: part.end_ns for r, part in zip(ranks, parts, strict=True)},
            rows={r: part.row for r, part in zip(ranks, parts, strict=True)},
        )
        for number, parts in enumerate(zip(*(by_rank[r] for r in ranks), strict=True))
        if len(ranks) > 1
    ]


def _step_of(one: Collective, steps: Sequence[Step]) -> int | None:
    for step in steps:
        if step.start_ns <= one.start_ns < step.end_ns:
            return step.number
    return None
