"""First pass over a batch: computes the hashes by which documents are compared."""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from ms_data.deduplication.minhash import MinHash
from ms_data.deduplication.options import DedupOptions
from ms_data.deduplication.sorting import DOCUMENT, RECORD, WINDOW
from ms_data.deduplication.windows import WindowHasher
from ms_data.engine.batches import DocumentBatch, Item
from ms_data.errors import OutputError
from ms_data.ledger.output import BatchResult
from ms_data.ledger.record import LedgerRecord
from ms_data.ledger.tally import Tally

_PREFIX_BYTES = 8


class SignatureFrame(msgspec.Struct, frozen=True, array_like=True):
    """Hashes of the documents of a batch; arrays as bytes."""

    first: int
    """Number of the first document."""
    exact: bytes
    """`RECORD`s: hashes of complete texts."""
    near: bytes
    """`RECORD`s: hashes of bands."""
    windows: bytes
    """`WINDOW` records."""
    facts: bytes
    """A `DOCUMENT` record for each document."""


class SignatureSetup(msgspec.Struct, frozen=True):
    """Options of a worker process, by name."""

    options: dict[str, bool | int | str | list[str]]


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that hashes a batch; request and result are msgpack."""
    options = DedupOptions(**msgspec.msgpack.decode(setup, type=SignatureSetup).options)  # type: ignore[arg-type]
    decoder = msgspec.msgpack.Decoder(DocumentBatch)
    signer = Signer(options)

    def work(request: bytes) -> bytes:
        batch = decoder.decode(request)
        content = msgspec.msgpack.encode(signer.frame(batch))
        # The run stores frames as they are; `read_frames` reads them by their length.
        frame = len(content).to_bytes(_PREFIX_BYTES, "little") + content
        count = len(batch.items)
        return msgspec.msgpack.encode(BatchResult((frame, b""), Tally(documents=count, kept=count)))

    return work


class Signer:
    """Computes the frames of batches."""

    def __init__(self, options: DedupOptions) -> None:
        self._options = options
        self._minhash = MinHash(
            bands=options.bands, rows=options.rows, ngram_words=options.ngram_words
        )
        self._windows = WindowHasher(options.substring_words)

    def frame(self, batch: DocumentBatch) -> SignatureFrame:
        """Compute the hashes of the documents of a batch."""
        readable = [(n, item.text) for n, item in enumerate(batch.items, batch.first) if item.text]
        numbers = np.array([number for number, _ in readable], np.uint32)
        texts = [text for _, text in readable]
        facts = np.zeros(len(batch.items), DOCUMENT)
        facts["size"] = [len((item.text or "").encode()) for item in batch.items]
        facts["rank"] = [self._priority_rank(item) for item in batch.items]
        return SignatureFrame(
            batch.first,
            self._exact_records(texts, numbers) if self._options.exact else b"",
            self._band_records(texts, numbers) if self._options.minhash and texts else b"",
            self._window_records(texts, numbers) if self._options.substring_words else b"",
            facts.tobytes(),
        )

    def _exact_records(self, texts: list[str], numbers: NDArray[np.uint32]) -> bytes:
        digests = [xxhash.xxh3_128_intdigest(text.encode()) for text in texts]
        records = np.zeros(len(texts), RECORD)
        # Key and check have 96 of the 128 bits, so different texts practically never match.
        records["key"] = [digest >> 64 for digest in digests]
        records["check"] = [digest & 0xFFFFFFFF for digest in digests]
        records["document"] = numbers
        return records.tobytes()

    def _band_records(self, texts: list[str], numbers: NDArray[np.uint32]) -> bytes:
        keys, checks = self._minhash.keys(self._minhash.signatures(texts))
        records = np.zeros(keys.shape, RECORD)  # (documents, bands)
        records["key"], records["check"] = keys, checks
        records["document"] = numbers[:, None]
        return records.tobytes()

    def _window_records(self, texts: list[str], numbers: NDArray[np.uint32]) -> bytes:
        parts = []
        for text, number in zip(texts, numbers.tolist(), strict=True):
            keys = self._windows.keys(text)
            records = np.zeros(len(keys), WINDOW)
            records["key"], records["document"] = keys, number
            records["word"] = np.arange(len(keys), dtype=np.uint32)
            parts.append(records.tobytes())
        return b"".join(parts)

    def _priority_rank(self, item: Item) -> int:
        name = item.location.rpartition("#")[0]
        matching = (
            n for n, pattern in enumerate(self._options.priority) if fnmatchcase(name, pattern)
        )
        return next(matching, len(self._options.priority))


def read_frames(folder: Path, record: LedgerRecord) -> Iterator[SignatureFrame]:
    """Yield the frames that a run wrote, in order.

    Raises:
        OutputError: a file is damaged.
    """
    decoder = msgspec.msgpack.Decoder(SignatureFrame)
    for entry in record.files:
        path, hasher = folder / entry.name, xxhash.xxh3_128()
        with path.open("rb") as file:
            while prefix := file.read(_PREFIX_BYTES):
                # A damaged length must not make us allocate more than the file has.
                content = file.read(min(int.from_bytes(prefix, "little"), entry.size_bytes))
                hasher.update(prefix + content)
                try:
                    yield decoder.decode(content)
                except msgspec.MsgspecError as error:
                    raise OutputError(f"{path}: damaged; remove {folder.parent}") from error
        if hasher.hexdigest() != entry.checksum:
            raise OutputError(f"{path}: damaged; remove {folder.parent}")
