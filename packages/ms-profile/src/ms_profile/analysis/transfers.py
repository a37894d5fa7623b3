"""Transfers of a run's collectives: latency, bandwidth, slow groups, and what cost a run most."""

from collections import defaultdict

import numpy as np
from attrs import frozen

from ms_profile.analysis.ledger import Ledger
from ms_profile.links.fit import LinkFit, fit_link

FAIR_RATIO = 1.5
LEAST_RUNS = 3
MOST_MISFIT = 0.1


@frozen(kw_only=True)
class TransferFit:
    """Transfer time against message size over one kind of collective among the same ranks.

    The latency is that of the operation, which may go over the link several times: a ring's
    all-reduce does, and so does a backend that asks the receiver first. The bandwidth is the
    message's size over the time that it adds.
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    fit: LinkFit
    samples: int
    least_bytes: int
    """The line holds from this size on: backends send small messages in another way."""


def fit_transfers(ledger: Ledger) -> tuple[TransferFit, ...]:
    """Fit `transfer = latency + size / bandwidth` to the collectives of each kind and ranks.

    A run takes as long as the rank that is last to end: a sender is done once its own host has the
    message. Of the runs of each size the fastest counts, as whatever else goes on only adds. Kinds
    seen at fewer than two sizes are left out: a line needs two points. Where no line comes within
    10% of all sizes, the smallest are left out until one does.
    """
    Runs = dict[int, list[int]]
    least: dict[tuple[str, str, tuple[int, ...]], Runs] = defaultdict(lambda: defaultdict(list))
    for one, transfers in zip(ledger.matched, ledger.transfer_ns, strict=True):
        longest = max(transfers.values())
        if one.size_bytes and longest > 0:
            least[one.kind, one.group, tuple(sorted(transfers))][one.size_bytes].append(longest)
    found = []
    for (kind, group, ranks), by_size in sorted(least.items()):
        usable = {size: runs for size, runs in by_size.items() if len(runs) >= LEAST_RUNS}
        if len(usable) < 2:
            continue
        sizes = sorted(usable)
        fit = fit_link(sizes, [min(usable[size]) / 1e9 for size in sizes])
        while fit.residual > MOST_MISFIT and len(sizes) > 2:
            del sizes[0]
            fit = fit_link(sizes, [min(usable[size]) / 1e9 for size in sizes])
        found.append(
            TransferFit(
                kind=kind, group=group, ranks=ranks, fit=fit, least_bytes=sizes[0],
                samples=sum(len(usable[size]) for size in sizes),
            )
        )  # fmt: skip
    return tuple(found)


@frozen(kw_only=True)
class SlowGroup:
    """Ranks whose transfers take longer than the same transfers among others, or than usual."""

    ranks: tuple[int, ...]
    """The one rank that all slow groups share, where there is one; else the slowest group."""
    excess_ns: float
    """Transfer time over what is usual, summed over its collectives."""
    confidence: float
    """Share of 1,000 resamplings of the collectives in which these ranks come out slowest."""


def find_slow_group(ledger: Ledger, *, seed: int = 0) -> SlowGroup | None:
    """Name the ranks between which transfers are slow, from the collectives of a run.

    Groups that do the same kind and size are held against the fastest of them. A group without
    peers is held against its own fastest tenth: a link that is always slow, and the only one,
    looks like a fast one. None where no group's transfers are half as long again.
    """
    excess, usual = _excess_transfers(ledger)
    if not excess:
        return None
    groups = sorted({ranks for _, ranks, _ in excess})
    table = np.zeros((len(excess), len(groups)))
    for row, (_, ranks, amount) in enumerate(excess):
        table[row, groups.index(ranks)] = amount
    totals = table.sum(axis=0)
    first = int(totals.argmax())
    if totals[first] < (FAIR_RATIO - 1) * usual[groups[first]]:
        return None
    slow = [set(group) for group, total in zip(groups, totals, strict=True)
            if total > totals[first] / 2]  # fmt: skip
    shared = set.intersection(*slow)
    named = tuple(sorted(shared)) if len(slow) > 1 and len(shared) == 1 else groups[first]
    counted = np.array([set(named) <= set(group) for group in groups])
    random = np.random.default_rng(seed)
    resampled = random.poisson(1.0, (1000, len(excess))) @ table
    wins = counted[resampled.argmax(axis=1)].mean()
    return SlowGroup(
        ranks=named, excess_ns=float(totals[counted].sum()),
        confidence=float(wins * (len(excess) + 1) / (len(excess) + 2)),
    )  # fmt: skip


def _excess_transfers(
    ledger: Ledger,
) -> tuple[list[tuple[int, tuple[int, ...], float]], dict[tuple[int, ...], float]]:
    """Find each collective's transfer beyond the usual; and sum the usual transfers by group."""
    runs: dict[tuple[str, int | None, int], dict[tuple[int, ...], list[tuple[int, float]]]] = (
        defaultdict(lambda: defaultdict(list))
    )
    for number, (one, transfers) in enumerate(zip(ledger.matched, ledger.transfer_ns, strict=True)):
        ranks = tuple(sorted(transfers))
        signature = one.kind, one.size_bytes, len(ranks)
        runs[signature][ranks].append((number, float(np.mean(list(transfers.values())))))
    excess = []
    usual: dict[tuple[int, ...], float] = defaultdict(float)
    for by_group in runs.values():
        times = [np.array([time for _, time in own]) for own in by_group.values()]
        if len(times) > 1:
            fair = float(min(np.median(own) for own in times))
        else:
            fair = float(np.quantile(times[0], 0.1))
        for ranks, own in by_group.items():
            usual[ranks] += fair * len(own)
            excess += [(number, ranks, max(time - fair, 0.0)) for number, time in own]
    return excess, usual


@frozen(kw_only=True)
class Verdict:
    """What a run's waiting comes from."""

    ranks: tuple[int, ...]
    phase: str
    cost_ns: float
    """Time that the other ranks lost to it."""
    confidence: float


def diagnose(ledger: Ledger) -> Verdict | None:
    """Name the ranks and the phase that cost the others most: a slow rank or slow transfers.

    None where nothing was waited for and no transfer was slow.
    """
    suspect, slow = ledger.suspect, find_slow_group(ledger)
    if slow is not None and (
        suspect is None or suspect.phase == "link" or slow.excess_ns > suspect.caused_ns
    ):
        return Verdict(
            ranks=slow.ranks, phase="link", cost_ns=slow.excess_ns, confidence=slow.confidence
        )
    if suspect is None:
        return None
    everyone = sorted({rank for one in ledger.matched for rank in one.starts_ns})
    between_two = suspect.phase == "link" and len(everyone) == 2
    return Verdict(
        ranks=tuple(everyone) if between_two else (suspect.rank,),
        phase=suspect.phase,
        cost_ns=suspect.caused_ns,
        confidence=suspect.confidence,
    )
