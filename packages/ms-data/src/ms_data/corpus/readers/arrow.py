"""Reads Arrow files and streams batch by batch, including the shards of `datasets`."""

from collections.abc import Iterator

from ms_data.corpus.arrow_messages import CheckedMessages
from ms_data.corpus.reader import (
    FileReader,
    Invalid,
    OpenFile,
    ReadOptions,
    ReadResult,
    import_library,
)
from ms_data.corpus.tables import batch_documents, column_problem, guarded_pyarrow
from ms_data.corpus.unpacking import ByteReader

_FILE = b"ARROW1\0\0"
_STREAM = b"\xff\xff\xff\xff"


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[ReadResult]:
    with guarded_pyarrow(file, "Arrow table", "parquet") as arrow:
        content = ByteReader(file.blocks)
        if file.head.startswith(_FILE):  # the file format is a stream between magic and footer
            content.skip(len(_FILE))
        source = CheckedMessages(content)
        stream = import_library("pyarrow.ipc", "parquet", file).open_stream(source)
        problem = column_problem(arrow, stream.schema, options)
        if problem:
            yield Invalid(f"{file.path}: {problem}")
            return
        done = 0
        for batch in stream:
            # rows before `start`, from an earlier run
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
