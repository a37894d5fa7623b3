"""The waiting ledger: each collective is transfer plus wait, and a wait is charged to its cause.

A rank waits in a collective from its own entry until the last member enters; the rest is transfer.
What made that last rank late is looked for in what it did since a collective last held up both
ranks: the phases in which it spent more than the rank that waits. (A collective beside which
compute goes on, as DDP's do, holds nobody up and lets its ranks drift apart.) The excess of all
phases sums to the wait, as both ranks left that collective together; so each phase is charged its
share of the positive excess.
Time that the late rank itself spent waiting for a third is passed on to the one that it waited for;
time that it spent in transfers is the phase "link".
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
    """Wait of one rank in one collective, charged to a rank and what it was doing."""

    collective: int
    """Its place in `Ledger.matched`."""
    waiting: int
    cause: int
    phase: str
    """A key of `ms_profile.analysis.activity.PHASES`, or "link" for slower transfers."""
    wait_ns: float


@frozen(kw_only=True)
class Ledger:
    """Transfer and wait of every collective, and which ranks are charged with the waits."""

    matched: tuple[MatchedCollective, ...]
    late: tuple[int, ...]
    """The rank that entered each collective last."""
    wait_ns: tuple[dict[int, int], ...]
    transfer_ns: tuple[dict[int, int], ...]
    charges: tuple[Charge, ...]
    """Waits at the same time in two collectives are charged once; so they sum to wall time."""

    @cached_property
    def suspect(self) -> "Suspect | None":
        """The rank and phase that caused most waiting; see `find_suspect`."""
        return find_suspect(self)

    def charged_ns(self) -> dict[tuple[int, str], float]:
        """Wait charged by (rank, phase), most first."""
        sums: dict[tuple[int, str], float] = defaultdict(float)
        for charge in self.charges:
            sums[charge.cause, charge.phase] += charge.wait_ns
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def waited_ns(self) -> dict[int, float]:
        """Wait by the rank that waited."""
        sums: dict[int, float] = defaultdict(float)
        for charge in self.charges:
            sums[charge.waiting] += charge.wait_ns
        return dict(sums)


@frozen(kw_only=True)
class Suspect:
    """The rank and phase that caused most waiting."""

    rank: int
    phase: str
    caused_ns: float
    """Wait of all other ranks charged to it."""
    share: float
    """Its part of all charged wait."""
    confidence: float
    """Share of 1,000 resamplings of the collectives in which it comes out first."""


class _Coverage:
    """How much of a window a set of intervals covers; logarithmic in their number."""

    def __init__(self, intervals: Intervals) -> None:
        self._starts: list[int] = intervals[:, 0].tolist()
        self._ends: list[int] = intervals[:, 1].tolist()
        self._before: list[int] = np.concatenate(
            ([0], np.cumsum(intervals[:, 1] - intervals[:, 0]))
        ).tolist()

    def _until(self, instant: int) -> int:
        place = bisect_left(self._starts, instant)
        if not place:
            return 0
        return (
            self._before[place - 1] + min(instant, self._ends[place - 1]) - self._starts[place - 1]
        )

    def between(self, start: int, end: int) -> int:
        return max(self._until(end) - self._until(start), 0)


@frozen
class _Wait:
    start: int
    end: int
    causes: tuple[tuple[int, str, float], ...]
    """Rank, phase, and its share of this wait."""


@frozen(kw_only=True)
class _Blocking:
    """A collective that held ranks up."""

    entered: int
    """When its last rank entered."""
    ends: dict[int, int]
    """When it ended, for the ranks that were held up."""


@frozen(kw_only=True)
class _Progress:
    """What is known of each rank at the current collective."""

    phases: dict[int, dict[str, _Coverage]]
    waits: dict[int, list[_Wait]] = field(factory=lambda: defaultdict(list))
    held: dict[int, list[_Blocking]] = field(factory=lambda: defaultdict(list))
    """For each rank the collectives that held it up."""
    begins: Mapping[int, int] = field(factory=dict)
    """First traced instant of each rank; what is known of it before is not all that it did."""


def keep_ledger(
    matched: Sequence[MatchedCollective],
    phases: Mapping[int, Mapping[str, Intervals]],
    begins: Mapping[int, int] | None = None,
) -> Ledger:
    """Split each collective into wait and transfer, and charge the waits to their causes.

    Args:
        matched: on one clock, as `ms_profile.analysis.whole_run` aligns them.
        phases: for each rank disjoint intervals (N, 2) ns by phase on the same clock; what they
            leave is "host".
        begins: when each rank's trace begins, ns of the same clock, where some phases are also
            known from before; the first interval otherwise.
    """
    ordered = sorted(
        (one for one in matched if len(one.starts_ns) > 1),
        key=lambda one: max(one.starts_ns.values()),
    )
    known = _Progress(
        phases={
            rank: {name: _Coverage(own) for name, own in parts.items()}
            for rank, parts in phases.items()
        },
        begins=begins
        or {
            rank: min((int(own[0, 0]) for own in parts.values() if len(own)), default=0)
            for rank, parts in phases.items()
        },
    )
    late, waits, transfers, charges = [], [], [], []
    cursor: dict[int, int] = defaultdict(int)
    for number, one in enumerate(ordered):
        last = max(one.starts_ns, key=lambda rank: one.starts_ns[rank])
        entered = one.starts_ns[last]
        own_waits, own_transfers = {}, {}
        for rank, start in one.starts_ns.items():
            stop = min(max(entered, start), one.ends_ns[rank])
            own_waits[rank] = stop - start
            own_transfers[rank] = one.ends_ns[rank] - stop
            fresh = max(start, cursor[rank])
            if stop > start:
                causes = _causes(known, rank, last, start, stop, entered)
                known.waits[rank].append(_Wait(start, stop, causes))
                for cause, phase, share in causes if stop > fresh else ():
                    charges.append(
                        Charge(collective=number, waiting=rank, cause=cause, phase=phase,
                               wait_ns=share * (stop - fresh))
                    )  # fmt: skip
            cursor[rank] = max(cursor[rank], stop)
        _note_blocking(known, one)
        late.append(last)
        waits.append(own_waits)
        transfers.append(own_transfers)
    return Ledger(
        matched=tuple(ordered), late=tuple(late), wait_ns=tuple(waits),
        transfer_ns=tuple(transfers), charges=tuple(charges),
    )  # fmt: skip


def _note_blocking(known: _Progress, one: MatchedCollective) -> None:
    ends = {rank: end for rank, end in one.ends_ns.items() if _is_blocked(known, rank, one)}
    for rank in ends:
        known.held[rank].append(_Blocking(entered=max(one.starts_ns.values()), ends=ends))


def _is_blocked(known: _Progress, rank: int, one: MatchedCollective) -> bool:
    """Return whether a collective held up the rank, not just a thread that communicates for it."""
    if "collective" not in known.phases.get(rank, {}):
        return True
    end = one.ends_ns[rank]
    window = min(max(end - one.starts_ns[rank], 1), BLOCKED_NS)
    return 2 * known.phases[rank]["collective"].between(end - window, end) >= window


def _causes(
    known: _Progress, waiting: int, late: int, start: int, stop: int, entered: int
) -> tuple[tuple[int, str, float], ...]:
    """Share out a wait by rank and phase; the shares sum to 1."""
    origin = _last_shared(known, waiting, late, start)
    excess: dict[str, float] = {}
    spent_late, spent_own = float(entered - origin), float(start - origin)
    for phase in known.phases.get(late, {}):
        theirs = known.phases[late][phase].between(origin, entered)
        own_phases = known.phases.get(waiting, {})
        ours = own_phases[phase].between(origin, start) if phase in own_phases else 0
        excess[phase] = theirs - ours
        spent_late -= theirs
        spent_own -= ours
    excess["host"] = spent_late - spent_own
    # Exposed communication of the late rank is transfer, the link's, or wait, passed on.
    communicated = excess.pop("collective", 0.0)
    passed_on = _waited(known.waits[late], origin, entered)
    total_passed = sum(passed_on.values())
    own_waits = sum(_waited(known.waits[waiting], origin, start).values())
    more_wait = min(max(total_passed - own_waits, 0.0), max(communicated, 0.0))
    excess["link"] = communicated - more_wait
    shares: dict[tuple[int, str], float] = {
        (late, phase): float(amount) for phase, amount in excess.items() if amount > 0
    }
    for cause, amount in passed_on.items() if more_wait > 0 else ():
        shares[cause] = shares.get(cause, 0.0) + amount * more_wait / total_passed
    total = sum(shares.values())
    if total <= 0:
        return ((late, "host", 1.0),)
    return tuple((rank, phase, amount / total) for (rank, phase), amount in shares.items())


def _last_shared(known: _Progress, left: int, right: int, before: int) -> int:
    """Return when the last collective before an instant that held up both ranks ended, or `before`.

    Once all have entered, one rank may already be in the next while another notices late.
    """
    for one in reversed(known.held[left]):
        if right in one.ends and one.entered <= before:
            return min(max(one.ends[left], one.ends[right]), before)
    return min(max(known.begins.get(left, before), known.begins.get(right, before)), before)


def _waited(waits: Sequence[_Wait], start: int, end: int) -> dict[tuple[int, str], float]:
    """Sum how long, and because of whom, a rank waited inside a window."""
    found: dict[tuple[int, str], float] = defaultdict(float)
    cursor = start
    for wait in waits[-64:]:
        inside = min(wait.end, end) - max(wait.start, cursor)
        if inside > 0:
            for rank, phase, share in wait.causes:
                found[rank, phase] += inside * share
            cursor = max(cursor, wait.end)
    return found


def find_suspect(ledger: Ledger, *, floor_ns: float = 0.0, seed: int = 0) -> Suspect | None:
    """Name the rank and phase that cause most waiting, with a confidence; None without waits.

    Args:
        ledger: what was charged.
        floor_ns: charges below it, the clocks' error for instance, don't count.
        seed: of the resampling.
    """
    columns: dict[tuple[int, str], int] = {}
    cells: dict[tuple[int, int], float] = defaultdict(float)
    for charge in ledger.charges:
        if charge.wait_ns > floor_ns:
            column = columns.setdefault((charge.cause, charge.phase), len(columns))
            cells[charge.collective, column] += charge.wait_ns
    if not cells:
        return None
    rows = {number: place for place, number in enumerate(sorted({n for n, _ in cells}))}
    table = np.zeros((len(rows), len(columns)))
    for (number, column), amount in cells.items():
        table[rows[number], column] = amount
    totals = table.sum(axis=0)
    first = int(totals.argmax())
    random = np.random.default_rng(seed)
    weights: Any = random.poisson(1.0, (RESAMPLES, len(rows)))
    winners = (weights @ table).argmax(axis=1)
    rank, phase = list(columns)[first]
    return Suspect(
        rank=rank, phase=phase, caused_ns=float(totals[first]),
        share=float(totals[first] / totals.sum()),
        # Laplace's rule keeps n of n below certainty, so that one collective alone decides little.
        confidence=float((winners == first).mean() * (len(rows) + 1) / (len(rows) + 2)),
    )  # fmt: skip
