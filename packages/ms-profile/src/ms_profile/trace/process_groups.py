"""Name the process groups of collectives from the flight recorder's entries in the header."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from ms_profile.trace.columns import CollectiveMessage
from ms_profile.trace.records import DAMAGE
from ms_profile.vendors.category import Category

KEY: Final = "ms_profile_groups"
MAX_RANKS: Final = 1 << 24


class _GroupEntries(msgspec.Struct, frozen=True):
    """File with the process groups of collectives; `recording.flight_recorder` writes it."""

    names: list[str]
    groups: list[str]
    entries: list[tuple[int, int, int, int]]


def name_groups(
    header: Mapping[str, Any],
    names: Sequence[str],
    name: NDArray[np.integer[Any]],
    start_ns: NDArray[np.int64],
    category: NDArray[np.integer[Any]],
    messages: dict[int, CollectiveMessage],
) -> dict[int, CollectiveMessage]:
    """Return `messages` with the process groups that the header lists.

    Collectives with the same name and size run in the order of their creation. If the trace and the
    header have different numbers of such collectives, these get no group.

    Args:
        header: header of the trace.
        names: table of span names.
        name: name ids of the sorted spans, (N,).
        start_ns: starts of the spans, (N,).
        category: categories of the spans, (N,).
        messages: messages of collectives, by row.
    """
    listing = _read_entries(header)
    if listing is None:
        return messages
    # (creation time, group) of the recorded collectives, by name and number of elements.
    recorded: dict[tuple[str, int], list[tuple[int, str]]] = defaultdict(list)
    for code, group_id, elements, created in listing.entries:
        recorded[listing.names[code], elements].append((created, listing.groups[group_id]))
    # Rows of the trace's collectives without a group, by the same key, in order of start.
    rows: dict[tuple[str, int], list[int]] = defaultdict(list)
    collectives = np.flatnonzero(category == Category.COLLECTIVE)
    for row in collectives[np.argsort(start_ns[collectives], kind="stable")].tolist():
        message = messages.get(row)
        if message is not None and not message.group:
            rows[names[int(name[row])], message.sent_elements].append(row)
    members = _members(header)
    named = dict(messages)
    for key, group_rows in rows.items():
        groups = [group for _, group in sorted(recorded.get(key, ()))]
        # Entries are missing, for example overwritten in the buffer: pairing would be a guess.
        if len(groups) != len(group_rows):
            continue
        for row, group in zip(group_rows, groups, strict=True):
            ranks = members.get(group, ())
            named[row] = evolve(messages[row], group=group, ranks=ranks, group_size=len(ranks))
    return named


def _read_entries(header: Mapping[str, Any]) -> _GroupEntries | None:
    try:
        listing = msgspec.convert(header.get(KEY), _GroupEntries)
    except DAMAGE:
        return None
    in_range = all(
        0 <= code < len(listing.names) and 0 <= group < len(listing.groups)
        for code, group, _, _ in listing.entries
    )
    return listing if in_range else None


def _members(header: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Read the ranks of each group from the metadata of torch's profiler."""
    distributed = header.get("distributedInfo")
    configs = distributed.get("pg_config") if isinstance(distributed, dict) else None
    members = {}
    for config in configs if isinstance(configs, list) else ():
        ranks = config.get("ranks") if isinstance(config, dict) else None
        if isinstance(ranks, list) and all(
            isinstance(rank, int) and 0 <= rank < MAX_RANKS for rank in ranks
        ):
            members[str(config.get("pg_name"))] = tuple(ranks)
    return members
