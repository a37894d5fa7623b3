"""Finds rows with near-duplicate images by a perceptual hash.

The difference hash compares the brightness of horizontal neighbors in a 9 x 8 image (Krawetz 2013,
"Kind of like that"). If two 64-bit hashes differ in at most `bits` bits and are cut into more than
`bits` parts, at least one part is equal, so only hashes with an equal part are compared.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ms_data.cleaning.rows import RowRule, decode_row
from ms_data.cleaning.rule import Drop
from ms_data.cleaning.text import Text
from ms_data.cleaning.words import Splitter
from ms_data.corpus.corpus import Corpus
from ms_data.engine.batches import Progress, read_batches
from ms_data.media.images import decode_image

BITS = 64


def image_hash_of(picture: Any) -> int:
    """Return the 64-bit difference hash of a decoded image."""
    small = np.asarray(picture.convert("L").resize((9, 8)), np.int16)  # (8, 9) brightness
    return int.from_bytes(np.packbits(small[:, 1:] > small[:, :-1]).tobytes(), "big")


class HashIndex:
    """Hashes of the images of kept rows.

    Args:
        bits: maximum number of differing bits of near-duplicates.
    """

    def __init__(self, bits: int) -> None:
        self._bits = bits
        edges = np.linspace(0, BITS, bits + 2).astype(int).tolist()
        # (shift, mask) of each part
        self._parts = [(low, (1 << (high - low)) - 1) for low, high in pairwise(edges)]
        self._hashes_by_part: dict[tuple[int, int], list[int]] = {}

    def nearest(self, image_hash: int) -> int | None:
        """Return the number of bits by which the nearest hash differs; None if all are too far."""
        candidates = {
            other
            for index, (low, mask) in enumerate(self._parts)
            for other in self._hashes_by_part.get((index, image_hash >> low & mask), ())
        }
        distance = min(((image_hash ^ other).bit_count() for other in candidates), default=BITS)
        return distance if distance <= self._bits else None

    def add(self, image_hash: int) -> None:
        """Add the hash of an image of a kept row."""
        for index, (low, mask) in enumerate(self._parts):
            self._hashes_by_part.setdefault((index, image_hash >> low & mask), []).append(
                image_hash
            )


def near_rows(
    source: Corpus, rules: Sequence[RowRule], bits: int, split: Splitter
) -> Mapping[int, int]:
    """Find the rows with an earlier near-duplicate, among the rows that the rules keep.

    Returns:
        For every such row, by its number, the number of differing bits.
    """
    index, near_duplicates = HashIndex(bits), {}
    for read in read_batches(source, Progress(), lambda reason: None):
        for number, item in enumerate(read.batch.items, read.batch.first):
            text = Text(item.text or "", split)
            if item.text is None or any(isinstance(rule.apply(text), Drop) for rule in rules):
                continue
            files = rules[0].files(decode_row(text), "image")
            hashes = [image_hash_of(decode_image(file.content)) for file in files]
            distances = [
                distance for distance in map(index.nearest, hashes) if distance is not None
            ]
            if distances:
                near_duplicates[number] = min(distances)
                continue
            for image_hash in hashes:
                index.add(image_hash)
    return near_duplicates
