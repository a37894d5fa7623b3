"""Packs conversations and preference pairs as documents of a shard, and reads them by number.

A sample is one document of 32-bit words: a header, then tokens whose highest bit is the loss mask.

        conversations   weight (float32), tokens
        media           weight, start (64 bits) and size (32 bits) of its media, tokens
        preferences     weight, margin (float32), number of chosen tokens, chosen, rejected
        unpaired        weight, label (float32, 1 or 0), tokens

Both responses of a pair include the prompt.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ms_data.arguments import check_type, shown
from ms_data.disk.format import (
    DOCUMENT_KINDS,
    LOSS_BIT,
    MEDIA_FILE,
    MEDIA_SUFFIX,
    DocumentKind,
    checksummed_files,
)
from ms_data.disk.media import PlacedItem, media_span, read_media
from ms_data.disk.split import Split, dataset_folder
from ms_data.errors import DamageError, SettingError
from ms_data.files.untrusted import read_bytes
from ms_data.media.processor import Processor
from ms_data.media.settings import MediaSettings

CACHE_BYTES = 32 << 20
"""Size of the cache of decoded frames."""

_Words = NDArray[np.uint32]


class Sample(NamedTuple):
    """One conversation."""

    tokens: NDArray[np.int64]
    """Shape (n,)."""
    loss_mask: NDArray[np.bool_]
    """Shape (n,): True for tokens with loss, which are the assistant's."""
    weight: float = 1.0


class PairSample(NamedTuple):
    """Two responses to one prompt, each including the prompt."""

    chosen: Sample
    rejected: Sample
    weight: float = 1.0
    margin: float = 0.0


class UnpairedSample(NamedTuple):
    """A response with its label, including the prompt."""

    response: Sample
    label: bool
    """True if the response is desirable."""


def pack_sample(sample: Sample) -> _Words:
    """Pack a conversation as words, shape (n + 1,)."""
    return np.concatenate((_float_words(sample.weight), _words_with_loss_bit(sample)))


def pack_media_sample(sample: Sample) -> _Words:
    """Pack a conversation with images or audio; `set_media_span` completes the header."""
    return np.concatenate(
        (_float_words(sample.weight), np.zeros(3, np.uint32), _words_with_loss_bit(sample))
    )


def pack_pair(pair: PairSample) -> _Words:
    """Pack a preference pair as words."""
    size = np.array([len(pair.chosen.tokens)], np.uint32)
    header = (_float_words(pair.weight, pair.margin), size)
    return np.concatenate(
        (*header, _words_with_loss_bit(pair.chosen), _words_with_loss_bit(pair.rejected))
    )


def pack_unpaired(sample: UnpairedSample) -> _Words:
    """Pack a labeled response as words, shape (n + 2,)."""
    header = _float_words(sample.response.weight, float(sample.label))
    return np.concatenate((header, _words_with_loss_bit(sample.response)))


class Samples(Sequence[Sample | PairSample | UnpairedSample]):
    """The samples of one split by number, in the order of the corpus.

    Args:
        folder: output folder of `build` for an instruction or preference dataset.
        split: `train` or `held_out`.
        kind: required type: `conversations`, including those with images and audio,
            `preferences` or `unpaired`. None: any.

    Raises:
        SettingError: the folder holds no samples of this type, or no such split.
        DamageError: data on disk is damaged.
    """

    def __init__(
        self, folder: str | Path, split: str = "train", *, kind: DocumentKind | None = None
    ) -> None:
        if kind is not None and not (isinstance(kind, str) and kind in DOCUMENT_KINDS):
            raise SettingError(f"kind must be {' or '.join(DOCUMENT_KINDS)}, got {shown(kind)}")
        check_type("split", split, str, "the name of a split", error=SettingError)
        self.folder, self.split = dataset_folder(folder), split
        kinds: tuple[DocumentKind, ...] = (
            (kind,) if kind else ("conversations", "preferences", "unpaired", "media")
        )
        if kind == "conversations":
            kinds = ("conversations", "media")
        self._split = Split(self.folder, split, kinds=kinds, cache_bytes=CACHE_BYTES)
        self.kind: DocumentKind = self._split.kind
        self.dataset_index = self._split.index
        """Index of the dataset, with the fingerprint."""
        self._media: Split | None = None
        self._header = DOCUMENT_KINDS[self.kind].header_words
        ends = self._split.all_ends()
        self._starts = np.concatenate(([0], ends[:-1])).astype(np.int64)
        self.sizes: NDArray[np.int64] = np.diff(ends, prepend=0) - self._header
        """Tokens per sample, shape (count,); for pairs, both responses together."""
        if not len(self.sizes) or int(self.sizes.min()) < 1:
            raise DamageError(Path(folder, "index.json"), "index", "a sample has no tokens")

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(  # type: ignore[override]
        self, number: int
    ) -> Sample | PairSample | UnpairedSample:
        words = self._words(number)
        floats = words[:2].view(np.float32)  # weight, and the margin of a pair or a label
        if self.kind == "unpaired":
            response = _unpack_sample(words[self._header :], float(floats[0]))
            return UnpairedSample(response, bool(floats[1]))
        if self.kind != "preferences":
            return _unpack_sample(words[self._header :], float(floats[0]))
        size, body = int(words[2]), words[self._header :]
        if not 0 < size < len(body):
            raise DamageError(
                str(self._split.folder), f"sample {number}", "a response has no tokens"
            )
        chosen, rejected = _unpack_sample(body[:size], 1.0), _unpack_sample(body[size:], 1.0)
        return PairSample(chosen, rejected, float(floats[0]), float(floats[1]))

    def conversation(self, number: int) -> Sample:
        """Return sample `number` of a conversation dataset."""
        sample = self[number]
        if not isinstance(sample, Sample):
            raise SettingError("the dataset holds preference pairs, conversations are needed")
        return sample

    def pair(self, number: int) -> PairSample:
        """Return sample `number` of a preference dataset."""
        sample = self[number]
        if not isinstance(sample, PairSample):
            raise SettingError("the dataset holds conversations, preference pairs are needed")
        return sample

    def unpaired(self, number: int) -> UnpairedSample:
        """Return sample `number` of a dataset of labeled responses."""
        sample = self[number]
        if not isinstance(sample, UnpairedSample):
            raise SettingError(
                f"the dataset holds {DOCUMENT_KINDS[self.kind].label}, unpaired preferences are "
                "needed"
            )
        return sample

    def media(self, number: int) -> list[PlacedItem]:
        """Return the images and audio of sample `number`, in order.

        Raises:
            DamageError: data on disk is damaged.
        """
        if self.kind != "media":
            return []
        start, size = media_span(self._words(number, header=True))
        if not size:
            return []
        if self._media is None:
            name = self.split + MEDIA_SUFFIX
            self._media = Split(self.folder, name, kinds=("media",), cache_bytes=1 << 17)
        part = f"media of sample {number}"
        if start + size > self._media.tokens:
            raise DamageError(str(self.folder), part, "extend past the end of the shards")
        try:
            items = read_media(self._media.read(start, start + size).view(np.uint32))
        except ValueError as error:
            raise DamageError(str(self.folder), part, str(error)) from error
        if any(item.stop > self.sizes[number] for item in items):
            raise DamageError(str(self.folder), part, "extend past the tokens of the sample")
        return items

    @property
    def processor(self) -> Processor | None:
        """The processor for the images and audio; None for a text dataset.

        Raises:
            DamageError: the file with the processor settings is damaged.
        """
        if self.kind != "media":
            return None
        # The last group ends with the processor's settings; its checksum covers all of its files.
        names, expected = checksummed_files(self.dataset_index)[-1]
        contents = [read_bytes(self.folder / name, error=SettingError) for name in names]
        path = self.folder / MEDIA_FILE
        if xxhash.xxh3_128_hexdigest(b"".join(contents)) != expected:
            raise DamageError(path, "file", "checksum differs from the index")
        return Processor(MediaSettings.decode(contents[-1], path))

    def _words(self, number: int, *, header: bool = False) -> _Words:
        start = int(self._starts[number])
        stop = start + self._header + (0 if header else int(self.sizes[number]))
        return self._split.read(start, stop).view(np.uint32)


def _float_words(*values: float) -> _Words:
    return np.array(values, "<f4").view(np.uint32)  # the same bits


def _words_with_loss_bit(sample: Sample) -> _Words:
    words = sample.tokens.astype(np.uint32)
    words[sample.loss_mask] |= LOSS_BIT  # token ids use the lower 31 bits
    return words


def _unpack_sample(words: _Words, weight: float) -> Sample:
    return Sample((words & ~LOSS_BIT).astype(np.int64), (words & LOSS_BIT) != 0, weight)
