"""The links of all pairs of ranks, as measured, and which of them is slow."""

from pathlib import Path
from typing import Final

import numpy as np
from attrs import frozen
from msgspec import Struct

from ms_profile.errors import FormatError
from ms_profile.files.untrusted import read_json
from ms_profile.links.fit import LinkFit

MOST_RANKS: Final = 4096
LONGEST_S: Final = 1e6
FAIR_RATIO: Final = 1.5
"""How many times the median pair's time a link may take."""


class PairLink(Struct, frozen=True, kw_only=True):
    """One pair's link, as measured from the lower rank."""

    first: int
    second: int
    fit: LinkFit
    sizes_bytes: tuple[int, ...]
    times_s: tuple[float, ...]
    """The fastest one-way time of each size: half of there and back."""


class LinkMatrix(Struct, frozen=True, kw_only=True, tag="ms-profile.links.1", tag_field="format"):
    """Every pair's link."""

    world_size: int
    backend: str
    hosts: tuple[str, ...]
    """Each rank's host."""
    pairs: tuple[PairLink, ...]

    def __post_init__(self) -> None:
        """Check that the parts fit together, as a file may hold anything.

        Raises:
            ValueError: they do not fit together.
        """
        if not 2 <= self.world_size <= MOST_RANKS or len(self.hosts) != self.world_size:
            raise ValueError(f"{len(self.hosts)} hosts of {self.world_size} ranks")
        for pair in self.pairs:
            if not 0 <= pair.first < pair.second < self.world_size:
                raise ValueError(f"a link of ranks {pair.first} and {pair.second}")
            if not pair.times_s or len(pair.times_s) != len(pair.sizes_bytes):
                raise ValueError(f"{len(pair.times_s)} times of {len(pair.sizes_bytes)} sizes")
            if not all(0 < time_s < LONGEST_S for time_s in pair.times_s):
                raise ValueError(f"times {pair.times_s} of ranks {pair.first} and {pair.second}")


def read_links(path: Path | str) -> LinkMatrix:
    """Read what `ms-profile link --out` wrote.

    Raises:
        FormatError: it is no such file, or is damaged.
    """
    return read_json(path, LinkMatrix, error=FormatError)


@frozen(kw_only=True)
class SlowLink:
    """The pair of ranks whose link is slowest against the others."""

    first: int
    second: int
    ratio: float
    """Its time for the largest message over the median pair's."""
    confidence: float
    """Share of the message sizes, smoothed, at which it is the slowest pair by a clear margin."""


def find_slow_link(links: LinkMatrix) -> SlowLink | None:
    """Name the pair that is slower than the median pair by half or more; None where none is.

    With two pairs or fewer, no pair can be called the slow one.
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
