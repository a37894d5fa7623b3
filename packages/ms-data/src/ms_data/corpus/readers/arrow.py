"""Reads Arrow tables, files and streams, batch by batch: the shards of `datasets` among them."""

import io
from collections.abc import Iterator
from typing import Any

from ms_data.corpus.reader import FileReader, Found, Invalid, OpenFile, ReadOptions
from ms_data.corpus.tables import batch_documents, column_problem, decoding_table

_FILE = b"ARROW1\0\0"
_STREAM = b"\xff\xff\xff\xff"
_BATCH_LIMIT_MIB = 2048
"""A record batch is read whole."""


class _Content(io.RawIOBase):
    """The content of a file as a file that is read in order."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._left = memoryview(b"")
        self._at = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _BATCH_LIMIT_MIB << 20:
            raise ValueError(
                f"a record batch of {size >> 20} MiB, more than {_BATCH_LIMIT_MIB}: "
                "write the table in smaller batches"
            )
        parts = []
        missing = size
        while missing:
            if not self._left:
                self._left = memoryview(next(self._blocks, b""))
                if not self._left:
                    break
            parts.append(self._left[:missing])
            self._left = self._left[missing:]
            missing -= len(parts[-1])
        self._at += size - missing
        return b"".join(parts)


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[Found]:
    with decoding_table(file, "Arrow table", "parquet") as arrow:
        content = _Content(file.blocks)
        head = content.read(len(_FILE))
        # A file is a stream between its mark and its list of batches.
        rest = content if head == _FILE else _Content(_joined(head, content))
        stream = _open(rest)
        problem = column_problem(arrow, stream.schema, options)
        if problem:
            yield Invalid(f"{file.path}: {problem}")
            return
        done = 0
        for batch in stream:
            skipped = max(0, min(start - done, batch.num_rows))
            if skipped < batch.num_rows:
                first = done + skipped + 1
                yield from batch_documents(arrow, batch.slice(skipped), file, options, first)
            done += batch.num_rows


def _joined(head: bytes, content: _Content) -> Iterator[bytes]:
    yield head
    while block := content.read(1 << 20):
        yield block


def _open(content: _Content) -> Any:
    import pyarrow.ipc

    return pyarrow.ipc.open_stream(content)


READER = FileReader(
    documents=_documents,
    suffixes=(".arrow", ".feather", ".arrows"),
    signatures=(_FILE, _STREAM),
    text=False,
)
