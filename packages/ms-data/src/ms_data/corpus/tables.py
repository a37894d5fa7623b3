"""Turns Arrow record batches into documents, whatever file they came from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from ms_data.corpus.reader import (
    TOO_LONG,
    Found,
    Invalid,
    OpenFile,
    ReadOptions,
    Row,
    damaged,
    library,
    not_utf8,
)
from ms_data.errors import CorpusError, DataError, printable

_FAULTS = (ValueError, TypeError, LookupError, OSError, MemoryError, OverflowError)
"""What decoders raise over bad content."""

_ROWS_AT_ONCE = 256
"""Rows that become Python values at a time."""


@contextmanager
def decoding_table(file: OpenFile, kind: str, extra: str) -> Iterator[Any]:
    """Give pyarrow, and turn what it raises over a file into one line.

    Raises:
        CorpusError: it is not installed, or the file is not whole.
    """
    arrow = library("pyarrow", extra, file)
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
            raise  # the disk's or the network's, not the file's
        # Parquet's decoders raise this as an OSError.
        if isinstance(error, NotImplementedError) or "Not yet implemented" in str(error):
            words = printable(" ".join(str(error).split()))
            raise CorpusError(
                f"{file.path}: pyarrow cannot read this {kind}, which need not be damaged "
                f"({words}); write it again with plain or dictionary encoding"
            ) from error
        raise damaged(file, kind, error) from error


def column_problem(arrow: Any, schema: Any, options: ReadOptions) -> str | None:
    """Say why no column of a table can be the text; None if one can, or rows are asked for."""
    if options.parse is not None:
        return None
    name = options.text_column
    found = schema.get_all_field_indices(name)
    if not found:
        have = ", ".join(schema.names[:20]) or "none"
        return f"no column {name!r}; it has: {have}{options.text_remedy}"
    if len(found) > 1:
        return f"{len(found)} columns {name!r}; write the table with one"
    kind = schema.field(name).type
    if not _is_text(arrow, kind):
        return f"the column {name!r} is {kind}, not text{options.text_remedy}"
    return None


def _is_text(arrow: Any, kind: Any) -> bool:
    types = arrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def batch_documents(
    arrow: Any, batch: Any, file: OpenFile, options: ReadOptions, first: int
) -> Iterator[Found]:
    """Yield each row of a record batch; `first` is the number of its first row, from 1."""
    for at in range(0, batch.num_rows, _ROWS_AT_ONCE):
        part = batch.slice(at, _ROWS_AT_ONCE)
        if options.rows:
            yield from _rows(arrow, part, file, first + at)
        else:
            values = _encoded(arrow, part.column(options.text_column))
            yield from _texts(values, file, options, first + at)


def _texts(
    values: Sequence[bytes | None], file: OpenFile, options: ReadOptions, first: int
) -> Iterator[Found]:
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
                yield Invalid(f"{file.path}: row {number}: {not_utf8(value)}")


def _encoded(arrow: Any, column: Any) -> Sequence[bytes | None]:
    """Take the bytes of each text; the offsets are checked before anything is read by them."""
    if arrow.types.is_dictionary(column.type):
        column.indices.validate(full=True)
        words = _encoded(arrow, column.dictionary)
        places = column.indices.to_pylist()
        if any(one is not None and not 0 <= one < len(words) for one in places):
            raise ValueError("an index lies beyond its dictionary")
        return [None if one is None else words[one] for one in places]
    if arrow.types.is_string_view(column.type):
        raw = column.view(arrow.binary_view())
    elif arrow.types.is_large_string(column.type):
        raw = column.view(arrow.large_binary())
    else:
        raw = column.view(arrow.binary())
    raw.validate(full=True)
    values: list[bytes | None] = raw.to_pylist()
    return values


def _rows(arrow: Any, batch: Any, file: OpenFile, first: int) -> Iterator[Found]:
    try:
        batch.validate(full=True)
        rows = batch.to_pylist()
    except (arrow.ArrowInvalid, UnicodeDecodeError) as error:
        if batch.num_rows == 1:
            yield Invalid(f"{file.path}: row {first}: {' '.join(str(error).split())}")
            return
        for at in range(batch.num_rows):
            yield from _rows(arrow, batch.slice(at, 1), file, first + at)
        return
    for number, row in zip(count(first), rows, strict=False):
        yield Row(_without_nulls(row), f"{file.path}: row {number}")


def _without_nulls(value: Any) -> Any:
    """Leave out members without a value: Arrow gives every struct all members that one has."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value
