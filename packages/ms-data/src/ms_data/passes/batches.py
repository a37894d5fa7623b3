"""Cuts a corpus into batches that depend on its documents alone, so that their bytes do too."""

from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from ms_data.corpus.corpus import Corpus, Document, Position

BATCH_CHARACTERS = 1 << 20
"""Text that one process works on at once."""


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One document of a batch, or one that cannot be read."""

    place: str
    """The file's name in the corpus and the document's number in it; of what cannot be read, its
    own words."""
    text: str | None
    """None where it cannot be read."""
    columns: bytes = b""
    """The other columns of its row as a JSON object; empty where there are none."""


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """Documents that are worked on together."""

    first: int
    """Number of the first document in the corpus."""
    items: list[Item]


class PassProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a corpus is done."""

    position: Position = Position()
    documents: int = 0
    """Documents, with those that cannot be read."""
    left_out: dict[str, int] = {}
    """Files of a folder left out because they are no text, by what they are."""
    empty: int = 0
    """Rows, lines and files that hold no text, which are no documents."""


class ReadBatch(msgspec.Struct, frozen=True):
    """A batch and how much of the corpus is done with it."""

    batch: Batch
    progress: PassProgress
    read_bytes: int
    """Bytes of the corpus read by then."""


def read_batches(
    source: Corpus, start: PassProgress, on_quarantine: Callable[[str], None]
) -> Iterator[ReadBatch]:
    """Yield the documents after `start`, about a MiB of text at a time.

    Args:
        source: with `skip_invalid`, what cannot be read is an item of its batch.
        start: where an earlier run stopped; a batch began there.
        on_quarantine: called with the place and fault of each document that cannot be read.
    """
    items: list[Item] = []
    size, first, empty = 0, start.documents, start.empty
    left_out = Counter(start.left_out)

    def quarantine(reason: str) -> None:
        items.append(Item(reason, None))
        on_quarantine(reason)

    def made(position: Position, read_bytes: int) -> ReadBatch:
        progress = PassProgress(
            position=position,
            documents=first + len(items),
            empty=empty,
            left_out=dict(sorted(left_out.items())),
        )
        return ReadBatch(Batch(first, items), progress, read_bytes)

    def on_leave_out(kind: str) -> None:
        left_out[kind] += 1

    def on_empty() -> None:
        nonlocal empty
        empty += 1

    for document in source.documents(start.position, quarantine, on_leave_out, on_empty):
        items.append(Item(_place(source, document), document.text, document.columns))
        size += len(document.text) + len(document.columns)
        if size >= BATCH_CHARACTERS:
            yield made(document.after, document.read_bytes)
            items, size, first = [], 0, first + len(items)
    yield made(Position(len(source.files)), source.size_bytes)


def _place(source: Corpus, document: Document) -> str:
    name = source.names[document.after.file]
    return f"{name}#{document.after.documents}"
