"""Cuts a corpus into batches that depend only on its documents, so that output is reproducible."""

from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from ms_data.corpus.corpus import Corpus, Position

BATCH_CHARACTERS = 1 << 20
"""Text per batch, the unit of work; the `tokenizers` library uses about 150 MB for it."""


class Item(msgspec.Struct, frozen=True, array_like=True):
    """A document of a batch, or the reason why it cannot be read."""

    location: str
    """File name in the corpus and document number in the file; for an unreadable document, the
    error."""
    text: str | None
    """None for an unreadable document."""
    columns: bytes = b""
    """Other columns of the row as a JSON object, or empty."""


class DocumentBatch(msgspec.Struct, frozen=True, array_like=True):
    """Documents that are processed together."""

    first: int
    """Index of the first document in the corpus."""
    items: list[Item]

    @property
    def texts(self) -> list[str]:
        """Texts of the readable documents."""
        return [item.text for item in self.items if item.text is not None]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a run through the corpus."""

    position: Position = Position()
    documents: int = 0
    """Documents so far, including unreadable ones."""
    left_out: dict[str, int] = {}
    """Number of skipped non-text files, by file type."""
    empty: int = 0
    """Rows, lines and files without text."""


class ReadBatch(msgspec.Struct, frozen=True):
    """A batch, with the progress after it."""

    batch: DocumentBatch
    progress: Progress
    read_bytes: int
    """Corpus bytes read up to the end of the batch."""
    characters: int
    """Total length of the documents."""


def read_batches(
    source: Corpus, start: Progress, on_skip: Callable[[str], None]
) -> Iterator[ReadBatch]:
    """Yield the documents after `start` in batches of about `BATCH_CHARACTERS`.

    Args:
        source: the corpus; with `skip_invalid`, unreadable documents become items of their batch.
        start: progress of an earlier run, at the start of a batch.
        on_skip: called with location and reason for every unreadable document.
    """
    items: list[Item] = []
    size, first, empty = 0, start.documents, start.empty
    left_out = Counter(start.left_out)

    def add_unreadable(reason: str) -> None:
        items.append(Item(reason, None))
        on_skip(reason)

    def on_leave_out(file_type: str) -> None:
        left_out[file_type] += 1

    def on_empty() -> None:
        nonlocal empty
        empty += 1

    def make_batch(position: Position, read_bytes: int) -> ReadBatch:
        progress = Progress(
            position=position,
            documents=first + len(items),
            empty=empty,
            left_out=dict(sorted(left_out.items())),
        )
        return ReadBatch(DocumentBatch(first, items), progress, read_bytes, size)

    for document in source.documents(start.position, add_unreadable, on_leave_out, on_empty):
        position = document.after
        location = f"{source.names[position.file]}#{position.documents}"
        items.append(Item(location, document.text, document.columns))
        # Batches end at document boundaries, independent of the number of workers.
        size += len(document.text) + len(document.columns)
        if size >= BATCH_CHARACTERS:
            yield make_batch(position, document.read_bytes)
            items, size, first = [], 0, first + len(items)
    # Possibly empty: it carries the final progress.
    yield make_batch(Position(len(source.files)), source.size_bytes)
