"""Converts Arrow record batches to documents, for all table formats."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from ms_data.corpus.reader import (
    TOO_LONG,
    Invalid,
    OpenFile,
    ReadOptions,
    ReadResult,
    Row,
    damaged_file,
    import_library,
    utf8_problem,
)
from ms_data.errors import CorpusError, DataError, printable

_FAULTS = (ValueError, TypeError, LookupError, OSError, MemoryError, OverflowError)
"""Exceptions that decoders raise on bad content."""

_ROWS_AT_ONCE = 256
"""Rows converted to Python objects at a time."""


@contextmanager
def guarded_pyarrow(file: OpenFile, format_name: str, extra: str) -> Iterator[Any]:
    """Yield pyarrow, and convert its errors about a file to `CorpusError`.

    Raises:
        CorpusError: pyarrow is not installed, or the file is damaged.
    """
    arrow = import_library("pyarrow", extra, file)
    try:
        yield arrow
    except DataError:
        raise
    except (
        arrow.ArrowException,
        ValueError,
        TypeError,
        LookupError,
        OSError,
        MemoryError,
    ) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a disk or network error, not a damaged file
        # Parquet decoders raise "Not yet implemented" as an OSError.
        if isinstance(error, NotImplementedError) or "Not yet implemented" in str(error):
            reason = printable(" ".join(str(error).split()))
            raise CorpusError(
                f"{file.path}: pyarrow does not support this {format_name} ({reason}); "
                "write it again with plain or dictionary encoding"
            ) from error
        raise damaged_file(file, format_name, error) from error


def column_problem(arrow: Any, schema: Any, options: ReadOptions) -> str | None:
    """Return why a table has no usable text column; None if it has one or rows are requested."""
    if options.parse is not None:
        return None
    name = options.text_column
    indices = schema.get_all_field_indices(name)
    if not indices:
        columns = ", ".join(schema.names[:20]) or "none"
        return f"no column {name!r}; the columns are: {columns}{options.text_remedy}"
    if len(indices) > 1:
        return f"{len(indices)} columns {name!r}; rename or remove the duplicates"
    column_type = schema.field(name).type
    if not _is_text(arrow, column_type):
        return f"column {name!r} has type {column_type}, not text{options.text_remedy}"
    return None


def _is_text(arrow: Any, column_type: Any) -> bool:
    types = arrow.types
    if types.is_dictionary(column_type):
        column_type = column_type.value_type
    return bool(
        types.is_string(column_type)
        or types.is_large_string(column_type)
        or types.is_string_view(column_type)
    )


def batch_documents(
    arrow: Any, batch: Any, file: OpenFile, options: ReadOptions, first: int
) -> Iterator[ReadResult]:
    """Yield the documents of a record batch; `first` is the number of its first row, from 1."""
    for offset in range(0, batch.num_rows, _ROWS_AT_ONCE):
        part = batch.slice(offset, _ROWS_AT_ONCE)
        if options.rows:
            yield from _rows(arrow, part, file, first + offset)
        else:
            values = _text_bytes(arrow, part.column(options.text_column))
            yield from _texts(values, file, options, first + offset)


def _texts(
    values: Sequence[bytes | None], file: OpenFile, options: ReadOptions, first: int
) -> Iterator[ReadResult]:
    limit = options.document_limit_bytes
    for number, value in zip(count(first), values, strict=False):
        if value is None:
            yield Invalid(
                f"{file.path}: row {number}: {options.text_column} is missing (null)"
                f"{options.text_remedy}"
            )
        elif len(value) > limit:
            yield Invalid(f"{file.path}: row {number}: {TOO_LONG}")
        else:
            try:
                yield value.decode()
            except UnicodeDecodeError:
                yield Invalid(f"{file.path}: row {number}: {utf8_problem(value)}")


def _text_bytes(arrow: Any, column: Any) -> Sequence[bytes | None]:
    """Return the bytes of every text, after validating offsets and indices."""
    if arrow.types.is_dictionary(column.type):
        # pyarrow trusts indices and offsets, and would read outside its buffers.
        column.indices.validate(full=True)
        dictionary = _text_bytes(arrow, column.dictionary)
        indices = column.indices.to_pylist()
        if any(index is not None and not 0 <= index < len(dictionary) for index in indices):
            raise ValueError("an index is outside its dictionary")
        return [None if index is None else dictionary[index] for index in indices]
    if arrow.types.is_string_view(column.type):
        raw = column.view(arrow.binary_view())
    elif arrow.types.is_large_string(column.type):
        raw = column.view(arrow.large_binary())
    else:
        raw = column.view(arrow.binary())
    raw.validate(full=True)
    values: list[bytes | None] = raw.to_pylist()
    return values


def _rows(arrow: Any, batch: Any, file: OpenFile, first: int) -> Iterator[ReadResult]:
    try:
        # If a batch is invalid, find the bad rows one at a time.
        batch.validate(full=True)
        rows = batch.to_pylist()
    except (arrow.ArrowInvalid, UnicodeDecodeError) as error:
        if batch.num_rows == 1:
            yield Invalid(f"{file.path}: row {first}: {' '.join(str(error).split())}")
            return
        for offset in range(batch.num_rows):
            yield from _rows(arrow, batch.slice(offset, 1), file, first + offset)
        return
    for number, row in zip(count(first), rows, strict=False):
        yield Row(_without_nulls(row), f"{file.path}: row {number}")


def _without_nulls(value: Any) -> Any:
    """Drop null members: every Arrow struct has the members of all rows."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
