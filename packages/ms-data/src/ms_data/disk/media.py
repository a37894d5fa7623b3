"""Packs the pictures and sounds of a conversation as a document of a shard beside it.

The split `train` has its pictures and sounds in the split `train_media`, in shards of the same
layout, so that every byte of them is checked as every token is. A conversation says where its
document of media begins and how long it is; that document is, in 32-bit words,

    count      how many pictures and sounds
    ITEM       one record each: what it is, its bytes, its place among the tokens, its grid
    files      as they were encoded, each filled up to whole words
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
"""What it is, 0 a picture and 1 a sound; its bytes; its first token, and how many; its grid."""

_KINDS: tuple[MediaKind, ...] = ("image", "audio")
_WORDS = NDArray[np.uint32]


class PlacedItem(NamedTuple):
    """A picture or a sound, and where it stands."""

    item: MediaItem
    start: int
    """Its first token, counted from the sample's."""

    @property
    def stop(self) -> int:
        """One past its last token."""
        return self.start + self.item.tokens


def pack_media(items: Sequence[PlacedItem]) -> _WORDS:
    """Pack items as words, shape (n,)."""
    table = np.zeros(len(items), ITEM)
    parts: list[bytes] = []
    for at, (item, start) in enumerate(items):
        table[at] = (_KINDS.index(item.kind), len(item.content), start, item.tokens, item.grid)
        parts += [item.content, bytes(-len(item.content) % 4)]
    head = np.uint32(len(items)).tobytes() + table.tobytes()
    return np.frombuffer(b"".join([head, *parts]), "<u4")


def read_media(words: _WORDS) -> list[PlacedItem]:
    """Read what `pack_media` packed.

    Raises:
        ValueError: it is something else.
    """
    content = words.astype("<u4", copy=False).tobytes()
    count = int(words[0])
    at = 4 + count * ITEM.itemsize
    if not 0 < count <= len(content) // ITEM.itemsize or at > len(content):
        raise ValueError(f"{count} pictures and sounds do not fit it")
    table = np.frombuffer(content, ITEM, count, 4)
    found = []
    for number, record in enumerate(table):
        size, kind = int(record["size"]), int(record["kind"])
        if kind >= len(_KINDS) or not 0 < size <= len(content) - at:
            raise ValueError(f"item {number} does not fit it")
        time, height, width = (int(side) for side in record["grid"])
        file, held = content[at : at + size], int(record["tokens"])
        item = MediaItem(_KINDS[kind], file, held, (time, height, width))
        found.append(PlacedItem(item, int(record["start"])))
        at += size + -size % 4
    if at != len(content):
        raise ValueError("it goes on after its last item")
    return found


def place_media(words: NDArray[np.integer], start: int, size: int) -> _WORDS:
    """Write into a conversation's header where its media stand in the split beside it."""
    placed = words.astype(np.uint32)
    placed[1:4] = (start & 0xFFFFFFFF, start >> 32, size)
    return placed


def media_place(words: _WORDS) -> tuple[int, int]:
    """Read from a conversation's header where its media begin, and how many words they have."""
    return int(words[1]) | int(words[2]) << 32, int(words[3])
