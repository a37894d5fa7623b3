"""Reads a split of a dataset as one sequence of tokens."""

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path, PurePath

import numpy as np
from numpy.typing import NDArray

from ms_data.arguments import shown
from ms_data.disk.format import DOCUMENT_KINDS, DocumentKind, Index, decode_index, frame_count
from ms_data.disk.frame_cache import FrameCache, LRUFrameCache, SharedFrameCache
from ms_data.disk.remote import INDEX_LIMIT_BYTES, RemoteShards
from ms_data.disk.shard import Frame, Shard
from ms_data.errors import DamageError, SettingError, printable
from ms_data.files.untrusted import check_path, open_file

OPEN_SHARDS = 128
"""Maximum number of open shards; each needs a descriptor and a table of about 100 kB."""


def dataset_folder(folder: str | Path) -> Path:
    """Return the path of a dataset folder on this machine.

    Raises:
        SettingError: the path is invalid on any operating system, or a URL.
    """
    if isinstance(folder, RemoteShards) or "://" in str(folder):
        raise SettingError(
            f"{printable(folder)} is a URL, and only TokenStream reads object stores; copy the"
            " folder to a disk"
        )
    check_path("a dataset", folder, error=SettingError)
    return Path(folder)


def any_folder(folder: str | Path | RemoteShards) -> Path | RemoteShards:
    """Return a dataset folder on this machine or, for a URL, in an object store.

    Raises:
        SettingError: the path is invalid, or the client of the store is not installed.
    """
    if isinstance(folder, str) and "://" in folder:
        return RemoteShards(folder)
    return folder if isinstance(folder, RemoteShards) else dataset_folder(folder)


def read_index(folder: Path | RemoteShards) -> Index:
    """Read and check `folder/index.json`.

    Raises:
        SettingError: the folder holds no dataset.
        DamageError: the index is damaged.
    """
    if isinstance(folder, RemoteShards):
        return _decode_index(folder.path("index.json"), folder.read_index())
    path = folder / "index.json"
    if not os.path.lexists(path):
        raise SettingError(
            f"{printable(folder)} holds no dataset (no index.json); build one with `ms-data build`"
        )
    try:
        with open_file(path, error=SettingError) as file:
            size = os.fstat(file.fileno()).st_size
            if size > INDEX_LIMIT_BYTES:
                raise DamageError(path, "file", f"has {size} bytes, too large for an index")
            content = file.readall()
    except OSError as error:
        raise DamageError(path, "file", f"cannot be read: {error.strerror}") from error
    return _decode_index(path, content)


def _decode_index(path: PurePath | str, content: bytes) -> Index:
    try:
        return decode_index(content)
    except RecursionError as error:
        raise DamageError(path, "index", "is nested too deeply") from error
    except (ValueError, OverflowError) as error:
        raise DamageError(path, "index", printable(error)) from error


class Split:
    """The documents of one split, end to end, addressed by token.

    Args:
        folder: folder of the dataset.
        name: name of the split.
        kinds: accepted document types.
        cache_bytes: size of the cache of decoded frames; at least one frame is cached.
        shared_cache: folder on this machine, ideally in memory, of a cache for all processes that
            read the split; None: a cache in this process.

    Raises:
        SettingError: the dataset has no such split, or another document type.
        DamageError: the index or, during reading, a shard is damaged.
    """

    def __init__(
        self,
        folder: str | Path | RemoteShards,
        name: str,
        *,
        kinds: tuple[DocumentKind, ...] = ("text",),
        cache_bytes: int = 0,
        shared_cache: str | Path | None = None,
    ) -> None:
        self.folder = any_folder(folder)
        self.index = read_index(self.folder)
        self.kind = self.index.document_kind
        if self.kind not in kinds:
            actual, expected = DOCUMENT_KINDS[self.kind], DOCUMENT_KINDS[kinds[0]]
            raise SettingError(
                f"{folder} holds {actual.label}, for {actual.stream}; use {expected.label} here"
            )
        self._entries = [shard for shard in self.index.shards if shard.split == name]
        if not self._entries:
            have = ", ".join(self.index.splits)
            raise SettingError(f"{folder} has no split {shown(name)}; the splits are: {have}")
        # First token of every shard within the split, then the total.
        self._starts = [0, *accumulate(entry.tokens for entry in self._entries)]
        self._shards: OrderedDict[int, Shard] = OrderedDict()
        # Caches number the frames of all shards in sequence.
        self._frames_before = [
            0,
            *accumulate(
                frame_count(entry.tokens, self.index.frame_tokens) for entry in self._entries
            ),
        ]
        self._frames = self._create_cache(name, cache_bytes, shared_cache)

    @property
    def tokens(self) -> int:
        """Number of tokens in the split."""
        return self._starts[-1]

    @property
    def documents(self) -> int:
        """Number of documents in the split."""
        return sum(entry.documents for entry in self._entries)

    def all_ends(self) -> NDArray[np.int64]:
        """Return one past the last token of every document, shape (documents,); decodes all frames.

        Raises:
            DamageError: a frame is damaged.
        """
        ends: list[NDArray[np.int64]] = []
        for number, start in enumerate(self._starts[:-1]):
            shard = self._open(number)
            # First token by frame.
            starts = range(start, self._starts[number + 1], self.index.frame_tokens)
            ends += [shard.read(frame).ends + first for frame, first in enumerate(starts)]
        return np.concatenate(ends)

    def read(self, start: int, stop: int) -> NDArray[np.unsignedinteger]:
        """Return the tokens from `start` to `stop`, which must be inside the split.

        Raises:
            DamageError: a frame that is needed is damaged.
        """
        parts = self._parts(start, stop)
        return np.concatenate([frame.tokens[low:high] for frame, low, high in parts])

    def read_into(self, out: NDArray[np.unsignedinteger], start: int) -> NDArray[np.int64]:
        """Fill `out`, shape (n,), with the tokens from `start`.

        Returns:
            Shape (e,), increasing: one past the last token of every document that ends inside.

        Raises:
            DamageError: a frame that is needed is damaged.
        """
        ends: list[NDArray[np.int64]] = []
        filled = 0
        for frame, low, high in self._parts(start, start + len(out)):
            out[filled : filled + high - low] = frame.tokens[low:high]
            # document ends in (low, high]
            first, last = np.searchsorted(frame.ends, (low, high), side="right")
            ends.append(frame.ends[first:last] + (filled - low))
            filled += high - low
        return np.concatenate(ends)

    def prefetch(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fetch the bytes of token ranges from an object store together; does nothing on a disk."""
        if not isinstance(self.folder, RemoteShards):
            return
        frames: dict[int, set[int]] = {}
        for start, stop in spans:
            while start < stop:
                shard = bisect_right(self._starts, start) - 1
                end = min(stop, self._starts[shard + 1])
                first = (start - self._starts[shard]) // self.index.frame_tokens
                last = (end - 1 - self._starts[shard]) // self.index.frame_tokens
                frames.setdefault(shard, set()).update(range(first, last + 1))
                start = end
        for shard, numbers in frames.items():
            self._open(shard).prefetch(numbers)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[Frame, int, int]]:
        """Yield the frames that hold tokens `start` to `stop`, each with its token range."""
        while start < stop:
            shard = bisect_right(self._starts, start) - 1
            number, low = divmod(start - self._starts[shard], self.index.frame_tokens)
            frame = self._frame(shard, number)
            high = min(len(frame.tokens), low + stop - start)
            yield frame, low, high
            start += high - low

    def _frame(self, shard: int, number: int) -> Frame:
        """Return a decoded frame, from the cache if possible."""
        key = self._frames_before[shard] + number  # frame number within the split
        frame = self._frames.get(key)
        if frame is None:
            frame = self._open(shard).read(number)
            self._frames.put(key, frame)
        return frame

    def _create_cache(self, name: str, size_bytes: int, folder: str | Path | None) -> FrameCache:
        tokens, token_type = self.index.frame_tokens, self.index.token_type
        if folder is None:
            return LRUFrameCache(max(1, size_bytes // (tokens * np.dtype(token_type).itemsize)))
        check_path("shared_cache", folder, error=SettingError)
        return SharedFrameCache(
            Path(folder),
            f"ms-data-{os.geteuid()}-{self.index.fingerprint}-{name}",
            frame_tokens=tokens,
            token_type=token_type,
            size_bytes=size_bytes,
        )

    def _open(self, number: int) -> Shard:
        shard = self._shards.get(number)
        if shard is None:
            shard = Shard(
                self.folder,
                self._entries[number],
                self.index.frame_tokens,
                fingerprint=self.index.fingerprint,
            )
            self._shards[number] = shard
            if len(self._shards) > OPEN_SHARDS:
                self._shards.popitem(last=False)[1].close()  # the least recently used
        self._shards.move_to_end(number)
        return shard
