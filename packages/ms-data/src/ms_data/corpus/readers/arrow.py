"""Reads Arrow tables, files and streams, batch by batch: the shards of `datasets` among them."""

import io
from collections.abc import Iterator

from ms_data.corpus.reader import FileReader, Found, Invalid, OpenFile, ReadOptions, library
from ms_data.corpus.tables import batch_documents, column_problem, decoding_table
from ms_data.corpus.unpacking import Content

_FILE = b"ARROW1\0\0"
_STREAM = b"\xff\xff\xff\xff"
_BATCH_LIMIT_MIB = 2048
"""A record batch is read whole."""


class _Stream(io.RawIOBase):
    """What pyarrow reads from: it asks for as many bytes as a file says that a batch has."""

    def __init__(self, content: Content, head: bytes) -> None:
        self._content = content
        self._head = head
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
        head, self._head = self._head[:size], self._head[size:]
        found = self._content.read(size - len(head))
        self._at += len(head) + len(found)
        return head + found if head else found


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[Found]:
    with decoding_table(file, "Arrow table", "parquet") as arrow:
        content = Content(file.blocks)
        head = content.read(len(_FILE))
        # A file is a stream between its mark and its list of batches.
        source = _Stream(content, b"" if head == _FILE else head)
        stream = library("pyarrow.ipc", "parquet", file).open_stream(source)
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


READER = FileReader(
    documents=_documents,
    suffixes=(".arrow", ".feather", ".arrows"),
    signatures=(_FILE, _STREAM),
    text=False,
)
