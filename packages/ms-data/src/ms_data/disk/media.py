"""Packs the images, audio and video of a conversation as a document of a media shard.

Those of the split `train` are in the split `train_media`, in shards of the same
layout, so that all their bytes are checked like token shards. The header of a conversation holds
the start and size of its media document, which consists of these 32-bit words:

        count      number of items
        ITEM       one record per item: type, bytes, position among the tokens, grid
        files      the encoded files, each padded to full words
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ms_data.media.parts import MediaKind
from ms_data.media.processor import MediaItem

ITEM = np.dtype(
    [(name, "<u4") for name in ("kind", "size", "start", "tokens")] + [("grid", "<u4", (3,))]
)
"""Record of an item: type (0 image, 1 audio, 2 video), bytes, first token, tokens, grid."""

_KINDS: tuple[MediaKind, ...] = ("image", "audio", "video")
_WORDS = NDArray[np.uint32]


class PlacedItem(NamedTuple):
    """An image, audio clip or video, with its position."""

    item: MediaItem
    start: int
    """Its first token, relative to the sample."""

    @property
    def stop(self) -> int:
        """One past its last token."""
        return self.start + self.item.tokens


def pack_media(items: Sequence[PlacedItem]) -> _WORDS:
    """Pack items as words, shape (n,)."""
    table = np.zeros(len(items), ITEM)
    parts: list[bytes] = []
    for index, (item, start) in enumerate(items):
        table[index] = (_KINDS.index(item.kind), len(item.content), start, item.tokens, item.grid)
        parts += [item.content, bytes(-len(item.content) % 4)]  # pad to 32-bit words
    header = np.uint32(len(items)).tobytes() + table.tobytes()
    return np.frombuffer(b"".join([header, *parts]), "<u4")


def read_media(words: _WORDS) -> list[PlacedItem]:
    """Unpack items that `pack_media` packed.

    Raises:
        ValueError: the words are not packed items.
    """
    content = words.astype("<u4", copy=False).tobytes()
    count = int(words[0])
    offset = 4 + count * ITEM.itemsize  # files start after the count and the records
    if not 0 < count <= len(content) // ITEM.itemsize or offset > len(content):
        raise ValueError(f"{count} media items do not fit in the document")
    table = np.frombuffer(content, ITEM, count, 4)
    items = []
    for number, record in enumerate(table):
        size, kind_index = int(record["size"]), int(record["kind"])
        if kind_index >= len(_KINDS) or not 0 < size <= len(content) - offset:
            raise ValueError(f"media item {number} does not fit in the document")
        time, height, width = (int(side) for side in record["grid"])
        file, tokens = content[offset : offset + size], int(record["tokens"])
        item = MediaItem(_KINDS[kind_index], file, tokens, (time, height, width))
        items.append(PlacedItem(item, int(record["start"])))
        offset += size + -size % 4
    if offset != len(content):
        raise ValueError("there are extra bytes after the last media item")
    return items


def set_media_span(words: NDArray[np.integer], start: int, size: int) -> _WORDS:
    """Store the start and size of a conversation's media document in its header."""
    updated = words.astype(np.uint32)
    updated[1:4] = (start & 0xFFFFFFFF, start >> 32, size)
    return updated


def media_span(words: _WORDS) -> tuple[int, int]:
    """Return the start and the number of words of a conversation's media document."""
    return int(words[1]) | int(words[2]) << 32, int(words[3])
