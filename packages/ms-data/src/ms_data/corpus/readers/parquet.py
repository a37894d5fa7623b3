"""Reads Parquet files, decoding a few MiB of one row group at a time."""

from collections.abc import Iterator
from typing import Any

from ms_data.corpus.file_kinds import NotText
from ms_data.corpus.parquet_pages import CheckedPages, Chunk, ReadBlockedError
from ms_data.corpus.reader import (
    FileReader,
    Invalid,
    OpenFile,
    ReadOptions,
    ReadResult,
    import_library,
)
from ms_data.corpus.tables import batch_documents, column_problem, guarded_pyarrow
from ms_data.corpus.unpacking import READ_BYTES

_BATCH_BYTES = 4 << 20
"""Approximate size of a decoded batch, for rows of average size."""

_SHARED_BYTES = 1 << 28
"""Memory limit per batch for values that are stored once and repeated in many rows."""

_METADATA_BYTES = 1 << 28
"""Limit for the names and statistics in a footer; no real file comes close."""


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[ReadResult]:
    if file.compressed:
        yield NotText("compressed Parquet file", "unpack it; its columns are already compressed")
        return
    with guarded_pyarrow(file, "Parquet table", "parquet") as arrow:
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
    return import_library("pyarrow.parquet", "parquet", file).ParquetFile(
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
    """Yield the batches after row `start`, each with the index of its first row."""
    first_row, bytes_before = 0, 0
    groups = [table.metadata.row_group(index) for index in range(table.metadata.num_row_groups)]
    total_bytes = max(1, sum(group.total_byte_size for group in groups))
    for number, group in enumerate(groups):
        row_bytes = group.total_byte_size / max(1, group.num_rows)
        rows_done = 0 if first_row + group.num_rows > start else group.num_rows
        for batch in [] if rows_done else _decode_group(table, pages, number, columns):
            bytes_done = bytes_before + row_bytes * (rows_done + batch.num_rows)
            file.done_bytes = min(file.size_bytes, int(file.size_bytes * bytes_done / total_bytes))
            # rows before `start`, from an earlier run
            skipped = max(0, start - first_row - rows_done)
            if skipped < batch.num_rows:
                yield batch.slice(skipped), first_row + rows_done + skipped
            rows_done += batch.num_rows
        if rows_done != group.num_rows:
            raise ValueError(f"row group {number} holds {rows_done} rows, not {group.num_rows}")
        first_row, bytes_before = first_row + group.num_rows, bytes_before + group.total_byte_size


def _decode_group(
    table: Any, pages: CheckedPages, number: int, columns: list[str] | None
) -> Iterator[Any]:
    """Decode a row group in batches small enough to bound the memory."""
    _check_chunks(table, pages, number, columns)
    group = table.metadata.row_group(number)
    paths = [table.schema.column(index).path for index in range(group.num_columns)]
    indices = [index for index, path in enumerate(paths) if columns is None or path in columns]
    selected = [group.column(index) for index in indices]
    chunks = [_chunk(column) for column in selected]
    pages.expect(chunks)
    row_bytes = group.total_byte_size / max(1, group.num_rows)
    size = min(group.num_rows, _BATCH_BYTES / max(1.0, row_bytes))  # rows per batch
    for column, chunk in zip(selected, chunks, strict=True):
        # A dictionary entry is stored once, but takes memory in every row that uses it.
        shared = pages.shared_bytes(column, chunk)
        if shared:
            size = min(size, _SHARED_BYTES / shared)
    batches: Iterator[Any] = table.iter_batches(
        max(1, int(size)), row_groups=[number], columns=columns, use_threads=False
    )
    return batches


def _check_chunks(table: Any, pages: CheckedPages, number: int, columns: list[str] | None) -> None:
    """Validate the footer's entry of a row group by a call of pyarrow that raises an error.

    pyarrow 26 aborts the process when it reads a single bad column.
    """
    pages.block_reads()
    try:
        next(table.iter_batches(1, row_groups=[number], columns=columns, use_threads=False), None)
    except ReadBlockedError:
        return  # the metadata is valid: pyarrow already tried to read a page
    finally:
        pages.allow_reads()


def _chunk(column: Any) -> Chunk:
    first = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset is not None:
        first = min(first, column.dictionary_page_offset)
    if min(first, column.total_compressed_size, column.total_uncompressed_size) < 0:
        raise ValueError(f"column {column.path_in_schema!r} has a negative size")
    return Chunk(first, first + column.total_compressed_size, column.total_uncompressed_size)


READER = FileReader(documents=_documents, suffixes=(".parquet",), signatures=(b"PAR1",), text=False)
