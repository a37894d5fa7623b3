"""Determines from all ranks' records which rank the others are waiting for."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from ms_parallel.cluster.watch.record import RankPosition

MAX_NAMED = 3
"""Maximum number of ranks and groups described individually; others are only counted."""


class State(StrEnum):
    """State of a process, as worded in the report."""

    ALIVE = "runs"
    STOPPED = "is stopped (by SIGSTOP or a debugger)"
    GONE = "is gone (killed, or ended by its own error)"
    SILENT = "does not respond (stopped, or its machine or network is down)"


def explain(records: Mapping[int, RankPosition], states: Mapping[int, State], world: int) -> str:
    """Describe which rank is missing, and the positions of the others.

    Args:
        records: last record of each rank that has sent one.
        states: state of each of these ranks.
        world: world size.
    """
    # 1. Processes that never started, are gone, stopped or silent.
    never_started = [rank for rank in range(world) if rank not in records]
    missing = [
        rank
        for rank, record in records.items()
        if states.get(rank) is not State.ALIVE and not record.lost
    ]
    if never_started or missing:
        clauses = [
            _describe_absence(records[rank], states.get(rank, State.SILENT))
            for rank in missing[:MAX_NAMED]
        ]
        if never_started:
            clauses.append(f"{ranks_text(never_started)} never started")
        return _compose_report(clauses, len(missing) - MAX_NAMED, records, missing)
    # 2. All are alive: a rank that does not wait holds up those that do.
    busy = [rank for rank, record in records.items() if not (record.waits_in or record.lost)]
    if busy and len(busy) < world:
        clauses = [
            f"{_name_process(records[rank])} is running but missing: it is in"
            f" {_describe_position(records[rank])} (raise timeout_s if it is only slow)"
            for rank in busy[:MAX_NAMED]
        ]
        return _compose_report(clauses, len(busy) - MAX_NAMED, records, busy)
    # 3. All wait: a rank at an earlier step holds up the others.
    min_step = min((record.step for record in records.values()), default=0)
    lagging = [rank for rank, record in records.items() if record.step == min_step]
    if 0 < len(lagging) < world:
        clauses = [f"{ranks_text(lagging)} only reached step {min_step}"]
        return _compose_report(clauses, 0, records, [])
    # 4. All wait at the same step: a rank that skipped a collective waits in another one.
    if not busy and (odd := _odd_ranks(records)) is not None:
        clauses = [
            f"{_name_process(records[rank])} differs from the others" for rank in odd[:MAX_NAMED]
        ]
        clauses[:0] = ["the ranks wait in different collectives because some rank has skipped one"]
        return _compose_report(clauses, len(odd) - MAX_NAMED, records, [])
    text = "no rank waits for another" if busy else "the ranks wait for each other"
    return _compose_report([text], 0, records, [])


def _odd_ranks(records: Mapping[int, RankPosition]) -> list[int] | None:
    """Return the ranks that wait in a different collective than most; None if all wait in one.

    Messages between pipeline ranks do not count, as they differ by rank.
    """
    by_collective: dict[str, list[int]] = {}
    for rank, record in sorted(records.items()):
        if not record.waits_in or record.waits_in.startswith("recv "):
            return None
        by_collective.setdefault(record.waits_in, []).append(rank)
    if len(by_collective) < 2:
        return None
    sizes = sorted(map(len, by_collective.values()))
    if sizes[-1] == sizes[-2]:  # no majority
        return []
    majority = max(by_collective.values(), key=len)
    return sorted(set(records) - set(majority))


def _describe_absence(record: RankPosition, state: State) -> str:
    return f"{_name_process(record)} {state}; last seen in {_describe_position(record)}"


def _name_process(record: RankPosition) -> str:
    return f"rank {record.rank} (process {record.pid} on {record.host})"


def _describe_position(record: RankPosition) -> str:
    waits = f", waiting in {record.waits_in}" if record.waits_in else ""
    return f"step {record.step}, {record.activity}{waits}, at {record.line}"


def _compose_report(
    clauses: Sequence[str],
    hidden: int,
    records: Mapping[int, RankPosition],
    mentioned: Sequence[int],
) -> str:
    groups: dict[str, list[int]] = {}
    for rank, record in sorted(records.items()):
        if rank not in mentioned:
            groups.setdefault(_describe_position(record), []).append(rank)
    largest = sorted(groups.items(), key=lambda group: -len(group[1]))
    parts = [*clauses, *([f"the same for {hidden} more ranks"] if hidden > 0 else [])]
    parts += [f"{ranks_text(ranks)}: {position}" for position, ranks in largest[:MAX_NAMED]]
    if len(largest) > MAX_NAMED:
        count = sum(len(ranks) for _, ranks in largest[MAX_NAMED:])
        parts.append(f"{count} ranks elsewhere")
    return "; ".join(parts)


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks compactly.

    >>> ranks_text([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    numbers = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    text = ", ".join(numbers[:8]) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
