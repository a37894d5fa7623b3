"""Reads Parquet: row group by row group, of which a few MiB are decoded at a time."""

from collections.abc import Iterator
from typing import Any

from ms_data.corpus.file_kinds import NotText
from ms_data.corpus.parquet_pages import CheckedPages, Chunk, HeldError
from ms_data.corpus.reader import FileReader, Found, Invalid, OpenFile, ReadOptions, library
from ms_data.corpus.tables import batch_documents, column_problem, decoding_table
from ms_data.corpus.unpacking import READ_BYTES

_BATCH_BYTES = 4 << 20
"""About so much is decoded at once, of rows of common size."""

_SHARED_BYTES = 1 << 28
"""What the rows of a batch may take whose values lie in the file once, and are repeated."""

_METADATA_BYTES = 1 << 28
"""More than the names and statistics of a file ever take."""


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[Found]:
    if file.packed:
        yield NotText("packed Parquet table", "unpack it; its columns are packed in themselves")
        return
    with decoding_table(file, "Parquet table", "parquet") as arrow:
        pages = CheckedPages(file.raw)
        table = _open(file, pages)
        problem = column_problem(arrow, table.schema_arrow, options)
        if problem:
            yield Invalid(f"{file.path}: {problem}")
            return
        columns = None if options.rows else [options.text_column]
        for batch, first in _batches(table, pages, start, file, columns):
            yield from batch_documents(arrow, batch, file, options, first + 1)


def _open(file: OpenFile, pages: CheckedPages) -> Any:
    return library("pyarrow.parquet", "parquet", file).ParquetFile(
        pages,
        buffer_size=READ_BYTES,
        pre_buffer=False,
        page_checksum_verification=True,
        thrift_string_size_limit=_METADATA_BYTES,
        thrift_container_size_limit=_METADATA_BYTES >> 4,
    )


def _batches(
    table: Any, pages: CheckedPages, start: int, file: OpenFile, columns: list[str] | None
) -> Iterator[tuple[Any, int]]:
    """Yield the batches after row `start`, with the number of the first row of each."""
    begin, begin_bytes = 0, 0
    groups = [table.metadata.row_group(one) for one in range(table.metadata.num_row_groups)]
    whole = max(1, sum(one.total_byte_size for one in groups))
    for number, group in enumerate(groups):
        row_bytes = group.total_byte_size / max(1, group.num_rows)
        done = 0 if begin + group.num_rows > start else group.num_rows
        for batch in [] if done else _decoded(table, pages, number, columns):
            read = begin_bytes + row_bytes * (done + batch.num_rows)
            file.done_bytes = min(file.size_bytes, int(file.size_bytes * read / whole))
            skipped = max(0, start - begin - done)
            if skipped < batch.num_rows:
                yield batch.slice(skipped), begin + done + skipped
            done += batch.num_rows
        if done != group.num_rows:
            raise ValueError(f"row group {number} holds {done} rows, not {group.num_rows}")
        begin, begin_bytes = begin + group.num_rows, begin_bytes + group.total_byte_size


def _decoded(
    table: Any, pages: CheckedPages, number: int, columns: list[str] | None
) -> Iterator[Any]:
    """Decode a row group, so few rows at a time that they cannot take much memory."""
    _check_chunks(table, pages, number, columns)
    group = table.metadata.row_group(number)
    paths = [table.schema.column(at).path for at in range(group.num_columns)]
    places = [at for at, path in enumerate(paths) if columns is None or path in columns]
    chosen = [group.column(at) for at in places]
    chunks = [_chunk(one) for one in chosen]
    pages.expect(chunks)
    each = group.total_byte_size / max(1, group.num_rows)
    size = min(group.num_rows, _BATCH_BYTES / max(1.0, each))
    for column, chunk in zip(chosen, chunks, strict=True):
        shared = pages.shared_bytes(column, chunk)
        if shared:
            size = min(size, _SHARED_BYTES / shared)
    batches: Iterator[Any] = table.iter_batches(
        max(1, int(size)), row_groups=[number], columns=columns, use_threads=False
    )
    return batches


def _check_chunks(table: Any, pages: CheckedPages, number: int, columns: list[str] | None) -> None:
    """Let pyarrow check what the footer says of a row group while it can still raise an error.

    pyarrow 26 ends the process when it is asked for one bad column by itself.
    """
    pages.hold()
    try:
        next(table.iter_batches(1, row_groups=[number], columns=columns, use_threads=False), None)
    except HeldError:
        return  # it was about to read a page
    finally:
        pages.release()


def _chunk(column: Any) -> Chunk:
    first = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset is not None:
        first = min(first, column.dictionary_page_offset)
    if min(first, column.total_compressed_size, column.total_uncompressed_size) < 0:
        raise ValueError(f"the column {column.path_in_schema!r} has a size below 0")
    return Chunk(first, first + column.total_compressed_size, column.total_uncompressed_size)


READER = FileReader(documents=_documents, suffixes=(".parquet",), signatures=(b"PAR1",), text=False)
