"""Reads Parquet: row group by row group, of which a few MiB are decoded at a time."""

from collections.abc import Iterator
from typing import Any

from ms_data.corpus.file_kinds import NotText
from ms_data.corpus.reader import FileReader, Found, Invalid, OpenFile, ReadOptions, library
from ms_data.corpus.tables import batch_documents, column_problem, decoding_table
from ms_data.corpus.unpacking import READ_BYTES

_BATCH_BYTES = 4 << 20
"""About so much is decoded at once, of rows of common size."""

_METADATA_BYTES = 1 << 28
"""What the names and statistics of a file never take."""


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[Found]:
    if file.packed:
        yield NotText("packed Parquet table", "unpack it; its columns are packed in themselves")
        return
    with decoding_table(file, "Parquet table", "parquet") as arrow:
        table = _open(file)
        problem = column_problem(arrow, table.schema_arrow, options)
        if problem:
            yield Invalid(f"{file.path}: {problem}")
            return
        columns = None if options.parse else [options.text_column]
        for batch, first in _batches(table, columns, start, file):
            yield from batch_documents(arrow, batch, file, options, first + 1)


def _open(file: OpenFile) -> Any:
    return library("pyarrow.parquet", "parquet", file).ParquetFile(
        file.raw,
        buffer_size=READ_BYTES,
        pre_buffer=False,
        page_checksum_verification=True,
        thrift_string_size_limit=_METADATA_BYTES,
        thrift_container_size_limit=_METADATA_BYTES >> 4,
    )


def _batches(
    table: Any, columns: list[str] | None, start: int, file: OpenFile
) -> Iterator[tuple[Any, int]]:
    """Gives the batches after row `start`, with the number of the first row of each."""
    begin, begin_bytes = 0, 0
    groups = [table.metadata.row_group(one) for one in range(table.metadata.num_row_groups)]
    whole = max(1, sum(one.total_byte_size for one in groups))
    for number, group in enumerate(groups):
        row_bytes = group.total_byte_size / max(1, group.num_rows)
        done = 0 if begin + group.num_rows > start else group.num_rows
        size = max(1, min(group.num_rows, int(_BATCH_BYTES / max(1.0, row_bytes))))
        for batch in [] if done else _decoded(table, number, size, columns):
            read = begin_bytes + row_bytes * (done + batch.num_rows)
            file.done_bytes = min(file.size_bytes, int(file.size_bytes * read / whole))
            skipped = max(0, start - begin - done)
            if skipped < batch.num_rows:
                yield batch.slice(skipped), begin + done + skipped
            done += batch.num_rows
        if done != group.num_rows:
            raise ValueError(f"row group {number} holds {done} rows, not {group.num_rows}")
        begin, begin_bytes = begin + group.num_rows, begin_bytes + group.total_byte_size


def _decoded(table: Any, group: int, size: int, columns: list[str] | None) -> Iterator[Any]:
    batches: Iterator[Any] = table.iter_batches(
        size, row_groups=[group], columns=columns, use_threads=False
    )
    return batches


READER = FileReader(documents=_documents, suffixes=(".parquet",), signatures=(b"PAR1",), text=False)
