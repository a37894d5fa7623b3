"""Reads a split of a dataset as one long row of tokens."""

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ms_data.disk.format import DOCUMENT_KINDS, DocumentKind, Index, decode_index, frame_count
from ms_data.disk.frame_cache import FrameCache, LRUFrameCache, SharedFrameCache
from ms_data.disk.shard import Frame, Shard
from ms_data.errors import DamageError, SettingError, printable
from ms_data.files.untrusted import check_path, open_file

OPEN_SHARDS = 128
"""Shards that a reader keeps open: one descriptor and a table of some 100 kB each."""


def dataset_folder(folder: str | Path) -> Path:
    """Take the path of a folder of shards.

    Raises:
        SettingError: no system takes it.
    """
    check_path("a dataset", folder, error=SettingError)
    return Path(folder)


def read_index(folder: Path) -> Index:
    """Read and check `folder/index.json`.

    Raises:
        SettingError: there is no dataset in the folder.
        DamageError: the index is not exactly what was written.
    """
    path = folder / "index.json"
    if not os.path.lexists(path):
        raise SettingError(
            f"{printable(folder)} holds no dataset (no index.json); build one with `ms-data build`"
        )
    try:
        with open_file(path, error=SettingError) as file:
            size = os.fstat(file.fileno()).st_size
            if size > INDEX_LIMIT_BYTES:
                raise DamageError(path, "file", f"has {size} bytes, more than any index")
            content = file.readall()
    except OSError as error:
        raise DamageError(path, "file", f"cannot be read: {error.strerror}") from error
    try:
        return decode_index(content)
    except RecursionError as error:
        raise DamageError(path, "index", "is nested too deeply") from error
    except (ValueError, OverflowError) as error:
        raise DamageError(path, "index", printable(error)) from error


INDEX_LIMIT_BYTES = 1 << 28
"""More than a million shards."""


class Split:
    """The documents of one split, end to end, addressed by token.

    Args:
        folder: the dataset.
        name: the split.
        kinds: what its documents may be.
        cache_bytes: of decoded frames that are kept; one at least.
        shared_cache: a folder of this machine, best in memory, where they are kept for all
            processes that read the split; None keeps the last used ones in this process.

    Raises:
        SettingError: the dataset has no such split, or documents of another kind.
        DamageError: the index or, when read, a shard is damaged.
    """

    def __init__(
        self,
        folder: str | Path,
        name: str,
        *,
        kinds: tuple[DocumentKind, ...] = ("text",),
        cache_bytes: int = 0,
        shared_cache: str | Path | None = None,
    ) -> None:
        self.folder = dataset_folder(folder)
        self.index = read_index(self.folder)
        self.kind = self.index.document_kind
        if self.kind not in kinds:
            held, wanted = DOCUMENT_KINDS[self.kind], DOCUMENT_KINDS[kinds[0]]
            raise SettingError(
                f"{folder} holds {held.label}, read by {held.stream}; give {wanted.label}"
            )
        self._entries = [shard for shard in self.index.shards if shard.split == name]
        if not self._entries:
            have = ", ".join(self.index.splits)
            raise SettingError(f"{folder} has no split {name!r}; it has: {have}")
        self._starts = [0, *accumulate(entry.tokens for entry in self._entries)]
        self._shards: OrderedDict[int, Shard] = OrderedDict()
        self._frames_before = [
            0,
            *accumulate(
                frame_count(entry.tokens, self.index.frame_tokens) for entry in self._entries
            ),
        ]
        self._frames = self._cache(name, cache_bytes, shared_cache)

    @property
    def tokens(self) -> int:
        """Tokens in the split."""
        return self._starts[-1]

    @property
    def documents(self) -> int:
        """Documents in the split."""
        return sum(entry.documents for entry in self._entries)

    def all_ends(self) -> NDArray[np.int64]:
        """Find one past the last token of each document, shape (documents,); decode every frame.

        Raises:
            DamageError: a frame is damaged.
        """
        ends: list[NDArray[np.int64]] = []
        for number, start in enumerate(self._starts[:-1]):
            shard = self._open(number)
            starts = range(start, self._starts[number + 1], self.index.frame_tokens)
            ends += [shard.read(frame).ends + first for frame, first in enumerate(starts)]
        return np.concatenate(ends)

    def read(self, start: int, stop: int) -> NDArray[np.unsignedinteger]:
        """Read the tokens from `start` to `stop`, which must lie inside the split.

        Raises:
            DamageError: a frame that holds some is damaged.
        """
        parts = self._parts(start, stop)
        return np.concatenate([frame.tokens[low:high] for frame, low, high in parts])

    def read_into(self, out: NDArray[np.unsignedinteger], start: int) -> NDArray[np.int64]:
        """Fill `out`, shape (n,), with the tokens from `start`.

        Returns:
            Shape (e,), increasing: one past the last token of each document that ends inside.

        Raises:
            DamageError: a frame that holds some is damaged.
        """
        ends: list[NDArray[np.int64]] = []
        done = 0
        for frame, low, high in self._parts(start, start + len(out)):
            out[done : done + high - low] = frame.tokens[low:high]
            first, last = np.searchsorted(frame.ends, (low, high), side="right")
            ends.append(frame.ends[first:last] + (done - low))
            done += high - low
        return np.concatenate(ends)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[Frame, int, int]]:
        """Yield each frame that holds tokens from `start` to `stop`, and where they stand in it."""
        while start < stop:
            shard = bisect_right(self._starts, start) - 1
            number, low = divmod(start - self._starts[shard], self.index.frame_tokens)
            frame = self._frame(shard, number)
            high = min(len(frame.tokens), low + stop - start)
            yield frame, low, high
            start += high - low

    def _frame(self, shard: int, number: int) -> Frame:
        """Return a decoded frame, which may have been kept, because samples share them."""
        key = self._frames_before[shard] + number
        frame = self._frames.get(key)
        if frame is None:
            frame = self._open(shard).read(number)
            self._frames.put(key, frame)
        return frame

    def _cache(self, name: str, size_bytes: int, folder: str | Path | None) -> FrameCache:
        tokens, kind = self.index.frame_tokens, self.index.token_type
        if folder is None:
            return LRUFrameCache(max(1, size_bytes // (tokens * np.dtype(kind).itemsize)))
        check_path("shared_cache", folder, error=SettingError)
        return SharedFrameCache(
            Path(folder),
            f"ms-data-{os.geteuid()}-{self.index.fingerprint}-{name}",
            frame_tokens=tokens,
            token_type=kind,
            size_bytes=size_bytes,
        )

    def _open(self, number: int) -> Shard:
        shard = self._shards.get(number)
        if shard is None:
            shard = Shard(self.folder, self._entries[number], self.index.frame_tokens)
            self._shards[number] = shard
            if len(self._shards) > OPEN_SHARDS:
                self._shards.popitem(last=False)[1].close()
        self._shards.move_to_end(number)
        return shard
