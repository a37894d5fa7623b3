"""Packs conversations and preference pairs as documents of a shard, and reads them by number.

A sample is one document of 32-bit words: a header, then tokens whose highest bit says whether
they are trained on.

    conversations   weight (float32), tokens
    media           weight, place of its pictures and sounds (64 bits, 32 bits), tokens
    preferences     weight, margin (float32), tokens of the chosen part, chosen, rejected

The chosen and the rejected part of a pair hold the prompt each, as they are trained on.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ms_data.disk.format import (
    KINDS,
    LOSS_BIT,
    MEDIA_FILE,
    MEDIA_SUFFIX,
    Kind,
    sealed_files,
)
from ms_data.disk.media import PlacedItem, media_place, read_media
from ms_data.disk.split import Split, dataset_folder
from ms_data.errors import DamageError, SettingError
from ms_data.files.untrusted import read_bytes
from ms_data.media.processor import Processor
from ms_data.media.settings import MediaSettings

CACHE_BYTES = 32 << 20
"""Decoded frames that are kept."""

_Words = NDArray[np.uint32]


class Sample(NamedTuple):
    """One conversation."""

    tokens: NDArray[np.int64]
    """Shape (n,)."""
    loss_mask: NDArray[np.bool_]
    """Shape (n,): whether the token is one of the assistant's, which are trained on."""
    weight: float = 1.0


class PairSample(NamedTuple):
    """Two answers to one prompt, each with the prompt before it."""

    chosen: Sample
    rejected: Sample
    weight: float = 1.0
    margin: float = 0.0


def pack_sample(sample: Sample) -> _Words:
    """Pack a conversation as words, shape (n + 1,)."""
    return np.concatenate((_floats(sample.weight), _marked(sample)))


def pack_media_sample(sample: Sample) -> _Words:
    """Pack a conversation that may have pictures and sounds, which `place_media` adds."""
    return np.concatenate((_floats(sample.weight), np.zeros(3, np.uint32), _marked(sample)))


def pack_pair(pair: PairSample) -> _Words:
    """Pack a pair as words."""
    size = np.array([len(pair.chosen.tokens)], np.uint32)
    header = (_floats(pair.weight, pair.margin), size)
    return np.concatenate((*header, _marked(pair.chosen), _marked(pair.rejected)))


class Samples(Sequence[Sample | PairSample]):
    """The samples of one split, by number, in the order of the corpus.

    Args:
        folder: what `build` wrote from an instruction or preference set.
        split: `train` or `held_out`.
        kind: `conversations`, those with pictures and sound included, or `preferences`, if it must
            be one of them.

    Raises:
        SettingError: the folder holds no samples of this kind, or no such split.
        DamageError: bytes are not those that were written.
    """

    def __init__(
        self, folder: str | Path, split: str = "train", *, kind: Kind | None = None
    ) -> None:
        self.folder, self.split = dataset_folder(folder), split
        kinds: tuple[Kind, ...] = (kind,) if kind else ("conversations", "preferences", "media")
        if kind == "conversations":
            kinds = ("conversations", "media")
        self._split = Split(folder, split, kinds=kinds, cache_bytes=CACHE_BYTES)
        self.kind: Kind = self._split.kind
        self.dataset_index = self._split.index
        """What the tokens mean, and the dataset's fingerprint."""
        self._media: Split | None = None
        self._header = KINDS[self.kind].header_words
        ends = self._split.all_ends()
        self._starts = np.concatenate(([0], ends[:-1])).astype(np.int64)
        self.sizes: NDArray[np.int64] = np.diff(ends, prepend=0) - self._header
        """Tokens of each sample, shape (count,); of a pair, both parts together."""
        if not len(self.sizes) or int(self.sizes.min()) < 1:
            raise DamageError(Path(folder, "index.json"), "index", "a sample has no tokens")

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> Sample | PairSample:  # type: ignore[override]
        words = self._words(number)
        floats = words[:2].view(np.float32)
        if self.kind != "preferences":
            return _read(words[self._header :], float(floats[0]))
        size, body = int(words[2]), words[self._header :]
        if not 0 < size < len(body):
            raise DamageError(self._split.folder, f"sample {number}", "its parts have no tokens")
        chosen, rejected = _read(body[:size], 1.0), _read(body[size:], 1.0)
        return PairSample(chosen, rejected, float(floats[0]), float(floats[1]))

    def conversation(self, number: int) -> Sample:
        """Read sample `number` of a dataset of conversations."""
        found = self[number]
        if not isinstance(found, Sample):
            raise SettingError("preference pairs where conversations are asked for")
        return found

    def pair(self, number: int) -> PairSample:
        """Read sample `number` of a dataset of preference pairs."""
        found = self[number]
        if not isinstance(found, PairSample):
            raise SettingError("conversations where preference pairs are asked for")
        return found

    def media(self, number: int) -> list[PlacedItem]:
        """Read the pictures and sounds of sample `number`, in their order.

        Raises:
            DamageError: bytes are not those that were written.
        """
        if self.kind != "media":
            return []
        start, size = media_place(self._words(number, header=True))
        if not size:
            return []
        if self._media is None:
            name = self.split + MEDIA_SUFFIX
            self._media = Split(self.folder, name, kinds=("media",), cache_bytes=1 << 17)
        where = f"media of sample {number}"
        if start + size > self._media.tokens:
            raise DamageError(self.folder, where, "lie beyond their shards")
        try:
            found = read_media(self._media.read(start, start + size).view(np.uint32))
        except ValueError as error:
            raise DamageError(self.folder, where, str(error)) from error
        if any(one.stop > self.sizes[number] for one in found):
            raise DamageError(self.folder, where, "stand beyond its tokens")
        return found

    @property
    def processor(self) -> Processor | None:
        """The processor that prepares pictures and sounds for a model; None where there are none.

        Raises:
            DamageError: its file is not the one that was written.
        """
        if self.kind != "media":
            return None
        names, expected = sealed_files(self.dataset_index)[-1]
        contents = [read_bytes(self.folder / name, error=SettingError) for name in names]
        path = self.folder / MEDIA_FILE
        if xxhash.xxh3_128_hexdigest(b"".join(contents)) != expected:
            raise DamageError(path, "file", "its checksum is not the one in the index")
        return Processor(MediaSettings.decode(contents[-1], path))

    def _words(self, number: int, *, header: bool = False) -> _Words:
        start = int(self._starts[number])
        stop = start + self._header + (0 if header else int(self.sizes[number]))
        return self._split.read(start, stop).view(np.uint32)


def _floats(*values: float) -> _Words:
    return np.array(values, "<f4").view(np.uint32)


def _marked(sample: Sample) -> _Words:
    words = sample.tokens.astype(np.uint32)
    words[sample.loss_mask] |= LOSS_BIT
    return words


def _read(words: _Words, weight: float) -> Sample:
    return Sample((words & ~LOSS_BIT).astype(np.int64), (words & LOSS_BIT) != 0, weight)
