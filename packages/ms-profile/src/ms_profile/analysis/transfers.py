"""Transfer times of a run's collectives: latency, bandwidth, slow groups, and the diagnosis."""

from collections import defaultdict

import numpy as np
from attrs import frozen

from ms_profile.analysis.ledger import Ledger
from ms_profile.arguments import check_type
from ms_profile.errors import TraceError
from ms_profile.links.fit import LinkFit, fit_link

FAIR_RATIO = 1.5  # a group is slow from 1.5 times the usual transfer time
MIN_RUNS = 3  # per size, so that the minimum is not one disturbed run
MAX_RESIDUAL = 0.1  # relative error of the line at which small sizes are dropped


@frozen(kw_only=True)
class TransferFit:
    """Transfer time as a function of message size, for one kind of collective and set of ranks.

    The latency includes every time that the operation crosses the link: several times in a ring
    all-reduce, or if the backend first asks the receiver whether it is ready. The bandwidth is the
    message size divided by the time above the latency.
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    fit: LinkFit
    samples: int
    least_bytes: int
    """Smallest fitted message size; backends send small messages by another protocol."""


def fit_transfers(ledger: Ledger) -> tuple[TransferFit, ...]:
    """Fit `transfer = latency + size / bandwidth` to each kind of collective and set of ranks.

    A collective takes as long as its slowest rank: a sender is done once its own host has the
    message. Other load only adds time, so the fastest run of each size is used. A kind needs at
    least two sizes. If the line misses a size by more than 10%, the smallest sizes are dropped.
    """
    Runs = dict[int, list[int]]
    times: dict[tuple[str, str, tuple[int, ...]], Runs] = defaultdict(lambda: defaultdict(list))
    for collective, transfers in zip(ledger.matched, ledger.transfer_ns, strict=True):
        longest = max(transfers.values())
        if collective.size_bytes and longest > 0:
            times[collective.kind, collective.group, tuple(sorted(transfers))][
                collective.size_bytes
            ].append(longest)
    fits = []
    for (operation, group, ranks), by_size in sorted(times.items()):
        usable = {size: runs for size, runs in by_size.items() if len(runs) >= MIN_RUNS}
        if len(usable) < 2:
            continue
        sizes = sorted(usable)
        fit = fit_link(sizes, [min(usable[size]) / 1e9 for size in sizes])
        while fit.residual > MAX_RESIDUAL and len(sizes) > 2:
            del sizes[0]
            fit = fit_link(sizes, [min(usable[size]) / 1e9 for size in sizes])
        fits.append(
            TransferFit(
                kind=operation, group=group, ranks=ranks, fit=fit, least_bytes=sizes[0],
                samples=sum(len(usable[size]) for size in sizes),
            )
        )  # fmt: skip
    return tuple(fits)


@frozen(kw_only=True)
class SlowGroup:
    """Ranks whose transfers take longer than equal transfers of other groups, or than usual."""

    ranks: tuple[int, ...]
    """The rank common to all slow groups if it is unique, else the slowest group."""
    excess_ns: float
    """Transfer time in excess of the usual, summed over its collectives."""
    confidence: float
    """Share of 1,000 resamplings of the collectives in which these ranks are slowest."""


def find_slow_group(ledger: Ledger, *, seed: int = 0) -> SlowGroup | None:
    """Return the ranks with slow transfers between them; None if no group is 50% slower.

    Groups with collectives of the same kind and size are compared with the fastest such group. One
    without such peers is compared with its own fastest tenth, so if the only link is always slow,
    that goes unnoticed.

    Args:
        ledger: transfers of the run.
        seed: seed of the resampling.
    """
    excess, usual = _excess_transfers(ledger)
    if not excess:
        return None
    groups = sorted({ranks for _, ranks, _ in excess})
    table = np.zeros((len(excess), len(groups)))  # one nonzero per row: its group's excess in ns
    for row, (_, ranks, amount) in enumerate(excess):
        table[row, groups.index(ranks)] = amount
    totals = table.sum(axis=0)
    first = int(totals.argmax())
    if totals[first] < (FAIR_RATIO - 1) * usual[groups[first]]:
        return None
    # A rank with a slow link slows every group that it is in.
    slow = [set(group) for group, total in zip(groups, totals, strict=True)
            if total > totals[first] / 2]  # fmt: skip
    shared = set.intersection(*slow)
    slow_ranks = tuple(sorted(shared)) if len(slow) > 1 and len(shared) == 1 else groups[first]
    has_slow_ranks = np.array([set(slow_ranks) <= set(group) for group in groups])
    random = np.random.default_rng(seed)
    # (1000, groups). Poisson(1) weights approximate a bootstrap, as in `find_suspect`.
    resampled = random.poisson(1.0, (1000, len(excess))) @ table
    wins = has_slow_ranks[resampled.argmax(axis=1)].mean()
    return SlowGroup(
        ranks=slow_ranks, excess_ns=float(totals[has_slow_ranks].sum()),
        confidence=float(wins * (len(excess) + 1) / (len(excess) + 2)),
    )  # fmt: skip


def _excess_transfers(
    ledger: Ledger,
) -> tuple[list[tuple[int, tuple[int, ...], float]], dict[tuple[int, ...], float]]:
    """Return (collective, ranks, excess ns) of every collective, and the usual time per group."""
    runs: dict[tuple[str, int | None, int], dict[tuple[int, ...], list[tuple[int, float]]]] = (
        defaultdict(lambda: defaultdict(list))
    )
    for number, (collective, transfers) in enumerate(
        zip(ledger.matched, ledger.transfer_ns, strict=True)
    ):
        ranks = tuple(sorted(transfers))
        signature = collective.kind, collective.size_bytes, len(ranks)
        runs[signature][ranks].append((number, float(np.mean(list(transfers.values())))))
    excess = []
    usual: dict[tuple[int, ...], float] = defaultdict(float)
    for by_group in runs.values():
        times = [np.array([time for _, time in samples]) for samples in by_group.values()]
        # Other groups do the same transfer: the fastest group's median is the fair time.
        if len(times) > 1:
            fair = float(min(np.median(samples) for samples in times))
        else:
            fair = float(np.quantile(times[0], 0.1))
        for ranks, samples in by_group.items():
            usual[ranks] += fair * len(samples)
            excess += [(number, ranks, max(time - fair, 0.0)) for number, time in samples]
    return excess, usual


@frozen(kw_only=True)
class Verdict:
    """Main cause of a run's waiting."""

    ranks: tuple[int, ...]
    phase: str
    cost_ns: float
    """Time that the other ranks lost to it."""
    confidence: float


def diagnose(ledger: Ledger) -> Verdict | None:
    """Return the ranks and phase that cost the others most: a slow rank or slow transfers.

    None if there were neither waits nor slow transfers.
    """
    check_type("ledger", ledger, Ledger, "a Ledger, as in Analysis.ledger", error=TraceError)
    suspect, slow = ledger.suspect, find_slow_group(ledger)
    if slow is not None and (
        suspect is None or suspect.phase == "link" or slow.excess_ns > suspect.caused_ns
    ):
        return Verdict(
            ranks=slow.ranks, phase="link", cost_ns=slow.excess_ns, confidence=slow.confidence
        )
    if suspect is None:
        return None
    all_ranks = sorted({rank for collective in ledger.matched for rank in collective.starts_ns})
    # With two ranks, a slow link cannot be attributed to either of them.
    between_two = suspect.phase == "link" and len(all_ranks) == 2
    return Verdict(
        ranks=tuple(all_ranks) if between_two else (suspect.rank,),
        phase=suspect.phase,
        cost_ns=suspect.caused_ns,
        confidence=suspect.confidence,
    )
