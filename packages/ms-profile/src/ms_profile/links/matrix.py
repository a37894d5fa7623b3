"""Measured links of all pairs of ranks, and the slowest one."""

from pathlib import Path
from typing import Final

import numpy as np
from attrs import frozen
from msgspec import Struct

from ms_profile.errors import FormatError
from ms_profile.files.untrusted import read_json
from ms_profile.links.fit import LinkFit

MAX_RANKS: Final = 4096
MAX_TIME_S: Final = 1e6
FAIR_RATIO: Final = 1.5
"""A link is slow if it takes this many times the median pair's time."""


class PairLink(Struct, frozen=True, kw_only=True):
    """Link of one pair, as measured from the lower rank."""

    first: int
    second: int
    fit: LinkFit
    sizes_bytes: tuple[int, ...]
    times_s: tuple[float, ...]
    """Fastest one-way time per size: half of a round trip."""


class LinkMatrix(Struct, frozen=True, kw_only=True, tag="ms-profile.links.1", tag_field="format"):
    """Links of every pair of ranks."""

    world_size: int
    backend: str
    hosts: tuple[str, ...]
    """Host name of each rank."""
    pairs: tuple[PairLink, ...]

    def __post_init__(self) -> None:
        """Check that the fields are consistent, as a file may contain anything.

        Raises:
            ValueError: they are not.
        """
        if not 2 <= self.world_size <= MAX_RANKS or len(self.hosts) != self.world_size:
            raise ValueError(
                f"world_size must be 2 to {MAX_RANKS} with a host per rank, got {self.world_size} "
                f"ranks and {len(self.hosts)} hosts"
            )
        for pair in self.pairs:
            if not 0 <= pair.first < pair.second < self.world_size:
                raise ValueError(
                    f"a pair must be two ranks in order, got {pair.first} and {pair.second}"
                )
            if not pair.times_s or len(pair.times_s) != len(pair.sizes_bytes):
                raise ValueError(
                    f"a pair needs one time per size, got {len(pair.times_s)} times and "
                    f"{len(pair.sizes_bytes)} sizes"
                )
            if not all(0 < time_s < MAX_TIME_S for time_s in pair.times_s):
                raise ValueError(
                    f"times must be positive and below {MAX_TIME_S:.0f} s, got {pair.times_s} for "
                    f"ranks {pair.first} and {pair.second}"
                )


def read_links(path: Path | str) -> LinkMatrix:
    """Read a file written by `ms-profile link --out`.

    Raises:
        FormatError: the file has another format or is damaged.
    """
    return read_json(path, LinkMatrix, error=FormatError)


@frozen(kw_only=True)
class SlowLink:
    """The pair of ranks with the slowest link."""

    first: int
    second: int
    ratio: float
    """Its time divided by the median pair's, at the message size where it is slowest."""
    confidence: float
    """Smoothed share of message sizes at which it is the slowest pair by a clear margin."""


def find_slow_link(links: LinkMatrix) -> SlowLink | None:
    """Return the slowest pair if it takes 1.5 times the median pair's time or more; otherwise None.

    Fewer than three pairs have no majority to compare with, so the result is None.
    """
    if len(links.pairs) < 3:
        return None
    sizes = [pair.sizes_bytes for pair in links.pairs]
    if len(set(sizes)) > 1:
        return None
    times = np.array([pair.times_s for pair in links.pairs])  # (pairs, sizes)
    ratios = times / np.median(times, axis=0)
    # The largest message shows bandwidth, which matters most; then any size, which shows latency.
    worst = int(ratios[:, -1].argmax())
    if ratios[worst].max() < FAIR_RATIO:
        worst_latency = int(ratios.max(axis=1).argmax())
        if ratios[worst_latency].max() < FAIR_RATIO:
            return None
        worst = worst_latency
    column = int(ratios[worst].argmax())
    others = np.delete(ratios, worst, axis=0)
    clearly_slowest = ratios[worst] > 1.2 * others.max(axis=0)
    pair = links.pairs[worst]
    return SlowLink(
        first=pair.first,
        second=pair.second,
        ratio=float(ratios[worst, column]),
        # Laplace's rule of succession: a few sizes never give certainty.
        confidence=float((clearly_slowest.sum() + 1) / (len(clearly_slowest) + 2)),
    )
