"""Find the collectives of each rank and match them across ranks."""

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

# The first match counts, so a name comes before the names that it contains.
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
MAX_BYTES: Final = 1 << 52  # 4 PiB; larger sizes come from damaged traces
POINT_TO_POINT: Final = frozenset({"send", "receive", "send_receive"})


@frozen(kw_only=True)
class Collective:
    """One rank's part in a collective; times on that rank's clock."""

    row: int
    kind: str
    group: str
    """Name of the process group; empty if the backend gives none."""
    ranks: tuple[int, ...]
    """Members of the group; empty if the profiler lists none."""
    size_bytes: int | None
    """Size of this rank's message; None if shapes were not recorded."""
    start_ns: int
    end_ns: int


@frozen(kw_only=True)
class MatchedCollective:
    """A collective as seen by its ranks; times by rank, in ns."""

    key: Hashable
    kind: str
    group: str
    size_bytes: int | None
    starts_ns: dict[int, int]
    ends_ns: dict[int, int]
    rows: dict[int, int]


def kind_of(name: str) -> str:
    """Return the operation in the name of a kernel or scope, or "other"."""
    for operation, pattern in KINDS:
        if pattern.search(name):
            return operation
    return "other"


def find_collectives(trace: Trace) -> tuple[Collective, ...]:
    """Return the collectives of a trace in order of their start."""
    operations: dict[int, str] = {}
    collectives = []
    rows = trace.rows(Category.COLLECTIVE)
    for row in rows[np.argsort(trace.start_ns[rows], kind="stable")].tolist():
        code = int(trace.name[row])
        message = trace.messages.get(row)
        if code not in operations:
            operations[code] = kind_of(trace.names[code])
        operation = operations[code]
        # A kernel may be named after another operation: NCCL's barrier is an all-reduce.
        if message is not None and message.kind:
            operation = kind_of(message.kind)
        width = element_bytes(message.dtype) if message else None
        collectives.append(
            Collective(
                row=row,
                kind=operation,
                group=message.group if message else "",
                ranks=message.ranks if message else (),
                size_bytes=_size(message.sent_elements * width) if message and width else None,
                start_ns=int(trace.start_ns[row]),
                end_ns=int(trace.start_ns[row] + trace.duration_ns[row]),
            )
        )
    return tuple(collectives)


def _size(size_bytes: int) -> int | None:
    return size_bytes if 0 <= size_bytes <= MAX_BYTES else None


def match_collectives(
    collectives: Mapping[int, Sequence[Collective]], steps: Mapping[int, Sequence[Step]]
) -> tuple[MatchedCollective, ...]:
    """Match collectives across ranks: the n-th of its kind, group and size on each rank.

    If the ranks have different numbers of them in total, only steps in which the numbers agree are
    matched. Traces do not name the peer of a point-to-point message, so these are only
    matched in runs of two ranks.

    Args:
        collectives: collectives by rank, in order of their start.
        steps: steps by rank.
    """
    unnamed = {item.kind for items in collectives.values() for item in items if not item.group}
    # The members of a group issue its collectives in the same order, so the n-th ones of a
    # signature belong together.
    series: dict[Hashable, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for rank, items in collectives.items():
        for item in items:
            if item.kind in unnamed:  # if only some ranks name the group, names prevent matching
                item = evolve(item, group="", ranks=())
            operation = item.kind
            if operation in POINT_TO_POINT:
                if len(collectives) != 2:
                    continue
                operation = "send_receive"
            series[operation, item.group, item.ranks, item.size_bytes][rank].append(item)
    matched: list[MatchedCollective] = []
    for signature, by_rank in series.items():
        if len(by_rank) < 2:
            continue
        if len({len(items) for items in by_rank.values()}) == 1:
            matched += _match(signature, by_rank)
            continue
        # Some traces begin or end earlier than others: pair only within steps where counts agree.
        by_step: dict[Hashable, dict[int, list[Collective]]] = defaultdict(dict)
        for rank, items in by_rank.items():
            for item in items:
                by_step[_step_of(item, steps[rank])].setdefault(rank, []).append(item)
        for step, parts in by_step.items():
            if step is not None and len({len(items) for items in parts.values()}) == 1:
                matched += _match((signature, step), parts)
    # In the order in which the last rank entered.
    return tuple(sorted(matched, key=lambda item: max(item.starts_ns.values())))


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


def _step_of(collective: Collective, steps: Sequence[Step]) -> int | None:
    for step in steps:
        if step.start_ns <= collective.start_ns < step.end_ns:
            return step.number
    return None
