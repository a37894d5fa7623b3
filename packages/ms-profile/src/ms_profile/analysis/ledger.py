"""The waiting ledger: split each collective into transfer and wait, and charge waits to causes.

A rank waits in a collective from its own entry until the last member enters; the rest is transfer.
The cause is sought in the time since a collective last blocked both the waiting and the late rank:
the phases in which the late rank spent more time than the waiting one. (A collective that overlaps
with compute, as DDP's do, blocks no rank and lets ranks drift apart.) Both ranks left that
collective together, so the excess over all phases sums to the wait, and each phase is charged its
share of the positive excess. If the late rank itself waited for a third one, that time is passed on
to the third rank; time it spent in transfers is charged to the phase "link".
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from attrs import field, frozen

from ms_profile.analysis.collectives import MatchedCollective
from ms_profile.trace.intervals import Intervals

RESAMPLES = 1000
BLOCKED_NS = 50_000


@frozen(kw_only=True)
class Charge:
    """Wait of one rank in one collective, charged to a rank and its phase."""

    collective: int
    """Index into `Ledger.matched`."""
    waiting: int
    cause: int
    phase: str
    """Key of `ms_profile.analysis.activity.PHASES`, or "link" for slower transfers."""
    wait_ns: float


@frozen(kw_only=True)
class Ledger:
    """Transfer and wait of every collective, and the ranks charged with the waits."""

    matched: tuple[MatchedCollective, ...]
    late: tuple[int, ...]
    """Rank that entered each collective last."""
    wait_ns: tuple[dict[int, int], ...]
    transfer_ns: tuple[dict[int, int], ...]
    charges: tuple[Charge, ...]
    """Charged waits; concurrent waits in two collectives count once, so they sum to wall time."""

    @cached_property
    def suspect(self) -> "Suspect | None":
        """Rank and phase that caused most waiting; see `find_suspect`."""
        return find_suspect(self)

    def charged_ns(self) -> dict[tuple[int, str], float]:
        """Return the charged wait by (rank, phase), largest first."""
        sums: dict[tuple[int, str], float] = defaultdict(float)
        for charge in self.charges:
            sums[charge.cause, charge.phase] += charge.wait_ns
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def waited_ns(self) -> dict[int, float]:
        """Return the wait by the rank that waited."""
        sums: dict[int, float] = defaultdict(float)
        for charge in self.charges:
            sums[charge.waiting] += charge.wait_ns
        return dict(sums)


@frozen(kw_only=True)
class Suspect:
    """Rank and phase that caused most waiting."""

    rank: int
    phase: str
    caused_ns: float
    """Wait of all other ranks charged to it."""
    share: float
    """Share of all charged waits."""
    confidence: float
    """Share of 1,000 resamplings of the collectives in which it ranks first."""


class _Coverage:
    """Time of a window covered by intervals; O(log n) per query with prefix sums."""

    def __init__(self, intervals: Intervals) -> None:
        self._starts: list[int] = intervals[:, 0].tolist()
        self._ends: list[int] = intervals[:, 1].tolist()
        self._cumulative: list[int] = np.concatenate(
            ([0], np.cumsum(intervals[:, 1] - intervals[:, 0]))
        ).tolist()

    def _until(self, time_ns: int) -> int:
        # Intervals before `index` start before the time; only the last may extend beyond it.
        index = bisect_left(self._starts, time_ns)
        if not index:
            return 0
        return (
            self._cumulative[index - 1]
            + min(time_ns, self._ends[index - 1])
            - self._starts[index - 1]
        )

    def between(self, start: int, end: int) -> int:
        return max(self._until(end) - self._until(start), 0)


@frozen
class _Wait:
    start: int
    end: int
    causes: tuple[tuple[int, str, float], ...]
    """Rank, phase, and share of this wait; the shares sum to 1."""


@frozen(kw_only=True)
class _Blocking:
    """A collective that blocked ranks."""

    entered: int
    """Time at which its last rank entered."""
    ends: dict[int, int]
    """End time on each blocked rank."""


@frozen(kw_only=True)
class _RankHistory:
    """State of every rank while the collectives are processed in order."""

    phases: dict[int, dict[str, _Coverage]]
    waits: dict[int, list[_Wait]] = field(factory=lambda: defaultdict(list))
    blocking: dict[int, list[_Blocking]] = field(factory=lambda: defaultdict(list))
    """Collectives that blocked each rank."""
    trace_starts: Mapping[int, int] = field(factory=dict)
    """Start of each rank's trace; before it, only some phases are known."""


def build_ledger(
    matched: Sequence[MatchedCollective],
    phases: Mapping[int, Mapping[str, Intervals]],
    trace_starts: Mapping[int, int] | None = None,
) -> Ledger:
    """Split each collective into wait and transfer, and charge the waits to their causes.

    Args:
        matched: collectives on a common clock, as `ms_profile.analysis.whole_run` aligns them.
        phases: disjoint intervals (N, 2) ns by rank and phase, on the same clock; time that no
            interval covers is "host".
        trace_starts: start of each rank's trace in ns on the same clock, needed if some phases are
            known from before it. None: the first interval of the rank.
    """
    # In the order of the last entries, so that a rank's earlier waits are known when it is charged.
    ordered = sorted(
        (collective for collective in matched if len(collective.starts_ns) > 1),
        key=lambda collective: max(collective.starts_ns.values()),
    )
    history = _RankHistory(
        phases={
            rank: {name: _Coverage(intervals) for name, intervals in parts.items()}
            for rank, parts in phases.items()
        },
        trace_starts=trace_starts
        or {
            rank: min(
                (int(intervals[0, 0]) for intervals in parts.values() if len(intervals)), default=0
            )
            for rank, parts in phases.items()
        },
    )
    late, waits, transfers, charges = [], [], [], []
    # Collectives may overlap on a rank, but each instant of its time is charged only once.
    charged_until: dict[int, int] = defaultdict(int)
    for number, collective in enumerate(ordered):
        last = max(collective.starts_ns, key=lambda rank: collective.starts_ns[rank])
        entered = collective.starts_ns[last]
        rank_waits, rank_transfers = {}, {}
        for rank, start in collective.starts_ns.items():
            # [start, stop) is this rank's wait, [stop, end) its transfer.
            stop = min(max(entered, start), collective.ends_ns[rank])
            rank_waits[rank] = stop - start
            rank_transfers[rank] = collective.ends_ns[rank] - stop
            uncharged = max(start, charged_until[rank])
            if stop > start:
                # Recorded even if already charged, as later waits may be passed on through it.
                causes = _causes(history, rank, last, start, stop, entered)
                history.waits[rank].append(_Wait(start, stop, causes))
                for cause, phase, share in causes if stop > uncharged else ():
                    charges.append(
                        Charge(collective=number, waiting=rank, cause=cause, phase=phase,
                               wait_ns=share * (stop - uncharged))
                    )  # fmt: skip
            charged_until[rank] = max(charged_until[rank], stop)
        # Only now, as a collective cannot be the starting point for its own waits.
        _add_blocking(history, collective)
        late.append(last)
        waits.append(rank_waits)
        transfers.append(rank_transfers)
    return Ledger(
        matched=tuple(ordered), late=tuple(late), wait_ns=tuple(waits),
        transfer_ns=tuple(transfers), charges=tuple(charges),
    )  # fmt: skip


def _add_blocking(history: _RankHistory, collective: MatchedCollective) -> None:
    ends = {
        rank: end
        for rank, end in collective.ends_ns.items()
        if _is_blocked(history, rank, collective)
    }
    for rank in ends:
        history.blocking[rank].append(
            _Blocking(entered=max(collective.starts_ns.values()), ends=ends)
        )


def _is_blocked(history: _RankHistory, rank: int, collective: MatchedCollective) -> bool:
    """Return whether a collective blocked the rank, not only its communication thread."""
    if "collective" not in history.phases.get(rank, {}):
        return True
    end = collective.ends_ns[rank]
    # Blocked if communication was exposed for at least half of the last 50 µs.
    window = min(max(end - collective.starts_ns[rank], 1), BLOCKED_NS)
    return 2 * history.phases[rank]["collective"].between(end - window, end) >= window


def _causes(
    history: _RankHistory, waiting: int, late: int, start: int, stop: int, entered: int
) -> tuple[tuple[int, str, float], ...]:
    """Distribute a wait over ranks and phases, as (rank, phase, share); the shares sum to 1."""
    # Both ranks left a collective together at `origin`; compare what they did since.
    origin = _last_synchronized(history, waiting, late, start)
    excess: dict[str, float] = {}
    unexplained_late, unexplained_waiting = float(entered - origin), float(start - origin)
    for phase in history.phases.get(late, {}):
        late_ns = history.phases[late][phase].between(origin, entered)
        waiting_phases = history.phases.get(waiting, {})
        waiting_ns = waiting_phases[phase].between(origin, start) if phase in waiting_phases else 0
        excess[phase] = late_ns - waiting_ns
        unexplained_late -= late_ns
        unexplained_waiting -= waiting_ns
    # Time that no phase covers is "host".
    excess["host"] = unexplained_late - unexplained_waiting
    # The late rank's exposed communication is either transfer (link) or wait, which is passed on.
    exposed_excess = excess.pop("collective", 0.0)
    passed_on = _waited_in(history.waits[late], origin, entered)
    total_passed = sum(passed_on.values())
    waiting_waited = sum(_waited_in(history.waits[waiting], origin, start).values())
    # Only the waiting in excess of the waiting rank's own made the late rank late.
    extra_wait = min(max(total_passed - waiting_waited, 0.0), max(exposed_excess, 0.0))
    excess["link"] = exposed_excess - extra_wait
    shares: dict[tuple[int, str], float] = {
        (late, phase): float(amount) for phase, amount in excess.items() if amount > 0
    }
    # Divided in proportion to the causes of the late rank's own waits.
    for cause, amount in passed_on.items() if extra_wait > 0 else ():
        shares[cause] = shares.get(cause, 0.0) + amount * extra_wait / total_passed
    total = sum(shares.values())
    # No phase explains the wait, for example if it is shorter than the error of the clocks.
    if total <= 0:
        return ((late, "host", 1.0),)
    return tuple((rank, phase, amount / total) for (rank, phase), amount in shares.items())


def _last_synchronized(history: _RankHistory, first: int, second: int, before: int) -> int:
    """Return the end of the last collective that blocked both ranks before a time, or `before`.

    Once all ranks have entered, one may already be in the next collective before another returns.
    """
    for blocking in reversed(history.blocking[first]):
        if second in blocking.ends and blocking.entered <= before:
            return min(max(blocking.ends[first], blocking.ends[second]), before)
    return min(
        max(history.trace_starts.get(first, before), history.trace_starts.get(second, before)),
        before,
    )


def _waited_in(waits: Sequence[_Wait], start: int, end: int) -> dict[tuple[int, str], float]:
    """Return how long a rank waited inside a window, by (rank, phase) of the cause."""
    by_cause: dict[tuple[int, str], float] = defaultdict(float)
    # Waits in concurrent collectives overlap; the cursor counts each instant once.
    cursor = start
    for wait in waits[-64:]:  # older ones end before any window
        overlap = min(wait.end, end) - max(wait.start, cursor)
        if overlap > 0:
            for rank, phase, share in wait.causes:
                by_cause[rank, phase] += overlap * share
            cursor = max(cursor, wait.end)
    return by_cause


def find_suspect(ledger: Ledger, *, floor_ns: float = 0.0, seed: int = 0) -> Suspect | None:
    """Return the rank and phase that caused most waiting, with a confidence; None without waits.

    Args:
        ledger: charged waits of the run.
        floor_ns: ignore charges up to this, such as the error of the clocks.
        seed: seed of the resampling.
    """
    columns: dict[tuple[int, str], int] = {}
    cells: dict[tuple[int, int], float] = defaultdict(float)
    for charge in ledger.charges:
        if charge.wait_ns > floor_ns:
            column = columns.setdefault((charge.cause, charge.phase), len(columns))
            cells[charge.collective, column] += charge.wait_ns
    if not cells:
        return None
    # table: (collectives, causes), the wait in ns of each collective charged to each cause.
    rows = {number: row for row, number in enumerate(sorted({n for n, _ in cells}))}
    table = np.zeros((len(rows), len(columns)))
    for (number, column), amount in cells.items():
        table[rows[number], column] = amount
    totals = table.sum(axis=0)
    first = int(totals.argmax())
    # Poisson(1) weights approximate a bootstrap over collectives.
    random = np.random.default_rng(seed)
    weights: Any = random.poisson(1.0, (RESAMPLES, len(rows)))
    winners = (weights @ table).argmax(axis=1)
    rank, phase = list(columns)[first]
    return Suspect(
        rank=rank, phase=phase, caused_ns=float(totals[first]),
        share=float(totals[first] / totals.sum()),
        # Laplace's rule of succession: a few collectives never give certainty.
        confidence=float((winners == first).mean() * (len(rows) + 1) / (len(rows) + 2)),
    )  # fmt: skip
