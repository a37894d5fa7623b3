"""Which link is slow, and what latency and bandwidth the collectives of a run show."""

from collections import defaultdict

import numpy as np
from attrs import frozen

from ms_profile.ledger import Ledger
from ms_profile.link import LinkFit, LinkMatrix, fit_link

__all__ = ["SlowLink", "TransferFit", "fit_transfers", "name_slow_link"]

FAIR_RATIO = 1.5
LEAST_RUNS = 3


@frozen(kw_only=True)
class SlowLink:
    """The pair of ranks whose link is slowest against the others."""

    first: int
    second: int
    ratio: float
    """Its time for the largest message over the median pair's."""
    confidence: float
    """Share of the message sizes, smoothed, at which it is the slowest pair by a clear margin."""


@frozen(kw_only=True)
class TransferFit:
    """Transfer time against message size over one kind of collective of one group."""

    kind: str
    group: str
    fit: LinkFit
    samples: int


def name_slow_link(links: LinkMatrix) -> SlowLink | None:
    """Name the pair that is slower than the median pair by half or more; None where none is.

    Two or fewer pairs cannot tell which of them is the odd one.
    """
    if len(links.pairs) < 3:
        return None
    sizes = [pair.sizes_bytes for pair in links.pairs]
    if len(set(sizes)) > 1:
        return None
    times = np.array([pair.times_s for pair in links.pairs])
    ratios = times / np.median(times, axis=0)
    worst = int(ratios[:, -1].argmax())
    if ratios[worst].max() < FAIR_RATIO:
        worst_latency = int(ratios.max(axis=1).argmax())
        if ratios[worst_latency].max() < FAIR_RATIO:
            return None
        worst = worst_latency
    column = int(ratios[worst].argmax())
    others = np.delete(ratios, worst, axis=0)
    clear = ratios[worst] > 1.2 * others.max(axis=0)
    pair = links.pairs[worst]
    return SlowLink(
        first=pair.first,
        second=pair.second,
        ratio=float(ratios[worst, column]),
        confidence=float((clear.sum() + 1) / (len(clear) + 2)),
    )


def fit_transfers(ledger: Ledger) -> tuple[TransferFit, ...]:
    """Fit `transfer = latency + size / bandwidth` to the collectives of each kind and group.

    The least transfer of any rank and run counts for each size, as whatever else goes on only adds.
    Kinds seen at fewer than two sizes are left out: a line needs two points.
    """
    least: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for one, transfers in zip(ledger.meetings, ledger.transfer_ns, strict=True):
        positive = [amount for amount in transfers.values() if amount > 0]
        if one.size_bytes and positive:
            least[one.kind, one.group][one.size_bytes].append(min(positive))
    found = []
    for (kind, group), by_size in sorted(least.items()):
        usable = {size: runs for size, runs in by_size.items() if len(runs) >= LEAST_RUNS}
        if len(usable) < 2:
            continue
        times = [min(runs) / 1e9 for runs in usable.values()]
        found.append(
            TransferFit(
                kind=kind, group=group, fit=fit_link(list(usable), times),
                samples=sum(map(len, usable.values())),
            )
        )  # fmt: skip
    return tuple(found)
