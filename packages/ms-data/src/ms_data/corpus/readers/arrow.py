"""Reads Arrow tables, files and streams, batch by batch: the shards of `datasets` among them."""

from collections.abc import Iterator

from ms_data.corpus.arrow_messages import CheckedMessages
from ms_data.corpus.reader import FileReader, Found, Invalid, OpenFile, ReadOptions, library
from ms_data.corpus.tables import batch_documents, column_problem, decoding_table
from ms_data.corpus.unpacking import Content

_FILE = b"ARROW1\0\0"
_STREAM = b"\xff\xff\xff\xff"


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[Found]:
    with decoding_table(file, "Arrow table", "parquet") as arrow:
        content = Content(file.blocks)
        if file.head.startswith(_FILE):  # a stream between its mark and its list of batches
            content.skip(len(_FILE))
        source = CheckedMessages(content)
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
