"""Finds rows whose pictures are near-duplicates of an earlier row's, by a perceptual hash.

The hash is of differences: brightness of 9 x 8 fields, a bit for each pair of neighbours in a line
(Krawetz 2013, "Kind of like that"). Two of at most `bits` different bits have a part in common when
their 64 are cut in more parts than that, so only those are compared.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ms_data.cleaning.rows import RowRule, row_of
from ms_data.cleaning.rule import Drop
from ms_data.cleaning.text import Text
from ms_data.cleaning.words import Splitter
from ms_data.corpus.corpus import Corpus
from ms_data.media.pictures import decode_picture
from ms_data.passes.batches import PassProgress, read_batches

BITS = 64


def picture_hash(picture: Any) -> int:
    """The 64 bits of a decoded picture."""
    small = np.asarray(picture.convert("L").resize((9, 8)), np.int16)
    return int.from_bytes(np.packbits(small[:, 1:] > small[:, :-1]).tobytes(), "big")


class Seen:
    """The pictures of rows that are kept.

    Args:
        bits: how many bits two hashes may differ by and be near-duplicates.
    """

    def __init__(self, bits: int) -> None:
        self._bits = bits
        edges = np.linspace(0, BITS, bits + 2).astype(int).tolist()
        self._parts = [(low, (1 << (high - low)) - 1) for low, high in pairwise(edges)]
        self._known: dict[tuple[int, int], list[int]] = {}

    def nearest(self, found: int) -> int | None:
        """Return by how many bits the nearest hash differs; None where none is near enough."""
        alike = {
            other
            for at, (low, mask) in enumerate(self._parts)
            for other in self._known.get((at, found >> low & mask), ())
        }
        distance = min(((found ^ other).bit_count() for other in alike), default=BITS)
        return distance if distance <= self._bits else None

    def add(self, found: int) -> None:
        """Take the hash of a picture of a row that is kept."""
        for at, (low, mask) in enumerate(self._parts):
            self._known.setdefault((at, found >> low & mask), []).append(found)


def near_rows(
    source: Corpus, rules: Sequence[RowRule], bits: int, split: Splitter
) -> Mapping[int, int]:
    """Find the rows that have a near-duplicate before them, among those that rules keep.

    Returns:
        For each such row, by its number, by how many bits its picture differs.
    """
    seen, near = Seen(bits), {}
    for read in read_batches(source, PassProgress(), lambda reason: None):
        for number, item in enumerate(read.batch.items, read.batch.first):
            text = Text(item.text or "", split)
            if item.text is None or any(isinstance(rule.apply(text), Drop) for rule in rules):
                continue
            files = rules[0].files(row_of(text), "image")
            hashes = [picture_hash(decode_picture(file.content)) for file in files]
            distances = [one for one in map(seen.nearest, hashes) if one is not None]
            if distances:
                near[number] = min(distances)
                continue
            for one in hashes:
                seen.add(one)
    return near
