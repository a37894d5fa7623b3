"""Decides from all ranks' records which rank kept the others waiting."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from ms_parallel.cluster.watch.record import Record

NAMED = 3
"""Ranks, and groups of ranks, that are described; the rest is counted."""


class State(StrEnum):
    """What is known of a process, in the words of the report."""

    ALIVE = "runs"
    STOPPED = "is stopped (by SIGSTOP or a debugger)"
    GONE = "is gone (killed, or ended by an error of its own)"
    SILENT = "gives no sign (stopped, or its machine or network is down)"


def explain(records: Mapping[int, Record], states: Mapping[int, State], world: int) -> str:
    """Say who did not come, and where everybody stands.

    Args:
        records: the last that each rank has sent, if any.
        states: of each rank that has sent one.
        world: number of ranks.
    """
    never = [rank for rank in range(world) if rank not in records]
    absent = [
        rank
        for rank, record in records.items()
        if states.get(rank) is not State.ALIVE and not record.lost
    ]
    if never or absent:
        clauses = [
            _absent(records[rank], states.get(rank, State.SILENT)) for rank in absent[:NAMED]
        ]
        if never:
            clauses.append(f"{ranks_text(never)} never began")
        return _sentence(clauses, len(absent) - NAMED, records, absent)
    at_work = [rank for rank, record in records.items() if not (record.waits_in or record.lost)]
    if at_work and len(at_work) < world:
        clauses = [
            f"{_who(records[rank])} runs and did not come: it is in"
            f" {_where(records[rank])} (raise timeout_s if it is only slow)"
            for rank in at_work[:NAMED]
        ]
        return _sentence(clauses, len(at_work) - NAMED, records, at_work)
    least = min((record.step for record in records.values()), default=0)
    late = [rank for rank, record in records.items() if record.step == least]
    if 0 < len(late) < world:
        clauses = [f"{ranks_text(late)} came no further than step {least}"]
        return _sentence(clauses, 0, records, [])
    if not at_work and (apart := _in_other_collectives(records)) is not None:
        clauses = [f"{_who(records[rank])} does not meet the others" for rank in apart[:NAMED]]
        clauses[:0] = ["the ranks wait in different collectives, one of which somebody left out"]
        return _sentence(clauses, len(apart) - NAMED, records, [])
    what = "no rank waits for another" if at_work else "the ranks wait for one another"
    return _sentence([what], 0, records, [])


def _in_other_collectives(records: Mapping[int, Record]) -> list[int] | None:
    """Find the ranks that wait in another collective than most; None where all wait in one.

    Messages between pipeline ranks are no collectives: each may wait for another one's.
    """
    kinds: dict[str, list[int]] = {}
    for rank, record in sorted(records.items()):
        if not record.waits_in or record.waits_in.startswith("recv "):
            return None
        kinds.setdefault(record.waits_in, []).append(rank)
    if len(kinds) < 2:
        return None
    sizes = sorted(map(len, kinds.values()))
    if sizes[-1] == sizes[-2]:  # nobody is the odd one
        return []
    most = max(kinds.values(), key=len)
    return sorted(set(records) - set(most))


def _absent(record: Record, state: State) -> str:
    return f"{_who(record)} {state}; last heard of in {_where(record)}"


def _who(record: Record) -> str:
    return f"rank {record.rank} (process {record.pid} on {record.host})"


def _where(record: Record) -> str:
    waits = f", waiting in {record.waits_in}" if record.waits_in else ""
    return f"step {record.step}, {record.activity}{waits}, at {record.line}"


def _sentence(
    clauses: Sequence[str], more: int, records: Mapping[int, Record], named: Sequence[int]
) -> str:
    groups: dict[str, list[int]] = {}
    for rank, record in sorted(records.items()):
        if rank not in named:
            groups.setdefault(_where(record), []).append(rank)
    largest = sorted(groups.items(), key=lambda group: -len(group[1]))
    parts = [*clauses, *([f"so do {more} more ranks"] if more > 0 else [])]
    parts += [f"{ranks_text(each)} stood in {where}" for where, each in largest[:NAMED]]
    if len(largest) > NAMED:
        parts.append(f"{sum(len(each) for _, each in largest[NAMED:])} ranks stood elsewhere")
    return "; ".join(parts)


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in few words.

    >>> ranks_text([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    text = ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
