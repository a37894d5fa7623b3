"""Names of process groups for collectives whose backend names none, as the recording noted them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from ms_profile.trace.columns import CollectiveNote
from ms_profile.trace.records import DAMAGE
from ms_profile.vendors.category import Category

KEY: Final = "ms_profile_groups"
MOST_RANKS: Final = 1 << 24


class _Noted(msgspec.Struct, frozen=True):
    """See `ms_profile.recording.flight_recorder`, which writes it."""

    names: list[str]
    groups: list[str]
    entries: list[tuple[int, int, int, int]]


def name_groups(
    header: Mapping[str, Any],
    names: Sequence[str],
    name: NDArray[np.integer[Any]],
    start_ns: NDArray[np.int64],
    category: NDArray[np.integer[Any]],
    notes: dict[int, CollectiveNote],
) -> dict[int, CollectiveNote]:
    """Return `notes` with the process groups that the header lists.

    The collectives of one name and size happen in the order in which they were created; where the
    trace has another number of them than were noted, they stay without a group.

    Args:
        header: of the trace.
        names: by code.
        name: codes of the sorted spans, (N,).
        start_ns: of the spans, (N,).
        category: of the spans, (N,).
        notes: by row.
    """
    noted = _noted(header)
    if noted is None:
        return notes
    recorded: dict[tuple[str, int], list[tuple[int, str]]] = defaultdict(list)
    for code, number, elements, created in noted.entries:
        recorded[noted.names[code], elements].append((created, noted.groups[number]))
    rows: dict[tuple[str, int], list[int]] = defaultdict(list)
    found = np.flatnonzero(category == Category.COLLECTIVE)
    for row in found[np.argsort(start_ns[found], kind="stable")].tolist():
        note = notes.get(row)
        if note is not None and not note.group:
            rows[names[int(name[row])], note.sent_elements].append(row)
    members = _members(header)
    named = dict(notes)
    for key, own in rows.items():
        groups = [group for _, group in sorted(recorded.get(key, ()))]
        if len(groups) != len(own):
            continue
        for row, group in zip(own, groups, strict=True):
            ranks = members.get(group, ())
            named[row] = evolve(notes[row], group=group, ranks=ranks, group_size=len(ranks))
    return named


def _noted(header: Mapping[str, Any]) -> _Noted | None:
    try:
        noted = msgspec.convert(header.get(KEY), _Noted)
    except DAMAGE:
        return None
    whole = all(
        0 <= code < len(noted.names) and 0 <= group < len(noted.groups)
        for code, group, _, _ in noted.entries
    )
    return noted if whole else None


def _members(header: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Read the ranks by the name of their group, as torch's profiler lists them."""
    place = header.get("distributedInfo")
    listed = place.get("pg_config") if isinstance(place, dict) else None
    found = {}
    for one in listed if isinstance(listed, list) else ():
        ranks = one.get("ranks") if isinstance(one, dict) else None
        if isinstance(ranks, list) and all(
            isinstance(rank, int) and 0 <= rank < MOST_RANKS for rank in ranks
        ):
            found[str(one.get("pg_name"))] = tuple(ranks)
    return found
