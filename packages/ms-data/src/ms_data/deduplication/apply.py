"""Second pass over a batch: writes the kept documents, without repeated parts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ms_data.deduplication.sorting import SPAN
from ms_data.deduplication.windows import cut_words
from ms_data.engine.batches import DocumentBatch, Item
from ms_data.ledger.output import BatchResult, compress_lines, document_line
from ms_data.ledger.tally import Entry, Tally, shorten


class DecisionFiles(msgspec.Struct, frozen=True):
    """Location of the decisions, for worker processes."""

    folder: str
    substrings: bool


class Decisions:
    """Decisions about all documents, in memory-mapped files."""

    def __init__(self, location: DecisionFiles) -> None:
        folder = Path(location.folder)
        self._keeper: NDArray[Any] = np.memmap(folder / "keeper", np.uint32, "r")
        self._same: NDArray[Any] = np.memmap(folder / "same", np.bool_, "r")
        self._starts: NDArray[Any] | None = None
        self._spans: NDArray[Any] = np.empty(0, SPAN)
        if location.substrings:
            self._starts = np.memmap(folder / "spans.starts", np.uint64, "r")
            if (folder / "spans.bin").stat().st_size:  # an empty file cannot be mapped
                self._spans = np.memmap(folder / "spans.bin", SPAN, "r")

    def keeper(self, document: int) -> int:
        """Return the document that replaces `document`; itself if it is kept."""
        return int(self._keeper[document])

    def same(self, document: int) -> bool:
        """Return whether a dropped document is an exact duplicate of the kept one."""
        return bool(self._same[document])

    def spans(self, document: int) -> list[tuple[int, int]]:
        """Return the word spans of a document that already occurred earlier in the corpus."""
        if self._starts is None:
            return []
        spans = self._spans[int(self._starts[document]) : int(self._starts[document + 1])]
        return list(zip(spans["first"].tolist(), spans["end"].tolist(), strict=True))


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that processes a batch; request and result are msgpack."""
    decisions = Decisions(msgspec.msgpack.decode(setup, type=DecisionFiles))
    decoder = msgspec.msgpack.Decoder(DocumentBatch)

    def work(request: bytes) -> bytes:
        return msgspec.msgpack.encode(write_batch(decoder.decode(request), decisions))

    return work


def write_batch(batch: DocumentBatch, decisions: Decisions) -> BatchResult:
    """Write the kept documents of a batch, and the ledger entries of all."""
    tally = Tally()
    documents: list[bytes] = []
    ledger: list[bytes] = []
    for number, item in enumerate(batch.items, batch.first):
        text, entry = _judge(number, item, decisions)
        if text is not None:
            documents.append(document_line(text, item.location, item.columns))
        ledger.append(msgspec.json.encode(entry))
        tally.count(entry, shorten(item.text or "") if entry.fate == "dropped" else "")
    return BatchResult((compress_lines(documents), compress_lines(ledger)), tally)


def _judge(number: int, item: Item, decisions: Decisions) -> tuple[str | None, Entry]:
    entry = Entry(document=number, place=item.location, fate="kept")
    text = item.text
    if text is None:
        entry.fate = "quarantined"
        return None, entry
    entry.bytes_in = len(text.encode())
    keeper = decisions.keeper(number)
    if keeper != number:
        entry.fate = "dropped"
        entry.reason = "exact" if decisions.same(number) else "minhash"
        entry.value = f"document {keeper}"  # the ledger names the kept document
        return None, entry
    if spans := decisions.spans(number):
        text = cut_words(text, spans)
        if not any(map(str.isalnum, text)):  # only signs and spaces remain
            entry.fate, entry.reason = "dropped", "substrings"
            return None, entry
        entry.changes = {"substrings": entry.bytes_in - len(text.encode())}
    entry.bytes_out = len(text.encode())
    return text, entry
