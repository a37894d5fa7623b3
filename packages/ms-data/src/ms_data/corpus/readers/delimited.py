"""Reads CSV and TSV files with a header line."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager

from ms_data.corpus.file_kinds import BINARY
from ms_data.corpus.reader import (
    TOO_LONG,
    FileReader,
    Invalid,
    OpenFile,
    ReadOptions,
    ReadResult,
    Row,
    utf8_problem,
)
from ms_data.corpus.unpacking import split_lines


class _TooLongError(Exception):
    """A row exceeds the document limit."""


class _Lines(Iterator[str]):
    """Lines of a file with their ends, counting the bytes of the current row."""

    def __init__(self, blocks: Iterator[bytes], limit: int) -> None:
        self._lines = split_lines(blocks, limit)
        self._limit = limit
        self._first = True
        self.row_bytes = 0

    def __next__(self) -> str:
        line = next(self._lines)
        self.row_bytes += self._limit + 1 if line is None else len(line)
        if line is None or self.row_bytes > self._limit:
            raise _TooLongError
        may_have_bom, self._first = self._first, False
        # Invalid UTF-8 survives as surrogates, and is reported for its row later.
        return line.decode("utf-8-sig" if may_have_bom else "utf-8", "surrogateescape") + "\n"


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[ReadResult]:
    delimiter = "\t" if file.name.lower().endswith(".tsv") else ","
    limit = options.document_limit_bytes
    lines = _Lines(file.blocks, limit)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    names: list[str] | None = None
    number = 0
    while True:
        # A quoted field may contain line breaks, so a row may take several lines.
        lines.row_bytes = 0
        row: ReadResult | list[str]
        try:
            with _field_size_limit(limit):
                row = next(rows)
        except StopIteration:
            return
        except _TooLongError:
            yield Invalid(f"{file.path}: row {number}: {TOO_LONG}; the rows after it are not read")
            return
        except csv.Error as error:
            row = Invalid(f"{file.path}: row {number}: malformed: {error}; fix the row")
        if names is None:
            problem = _header_problem(row, options)
            if problem:
                yield Invalid(f"{file.path}: {problem}")
                return
            names, number = list(row), 1
            continue
        if number > start:
            yield _document(row, names, f"{file.path}: row {number}", options)
        number += 1


def _header_problem(header: ReadResult | list[str], options: ReadOptions) -> str | None:
    """Return why the first line is not a usable header, or None."""
    if not isinstance(header, list) or not header:
        return "the first line must hold the column names; add a header line"
    name = options.text_column
    if options.parse is None and header.count(name) != 1:
        columns = ", ".join(header[:20])
        count = "no column" if name not in header else f"{header.count(name)} columns"
        return f"{count} {name!r}; the columns are: {columns}{options.text_remedy}"
    return None


def _document(
    row: ReadResult | list[str], names: list[str], location: str, options: ReadOptions
) -> ReadResult:
    if not isinstance(row, list):
        return row
    if not row:
        return ""  # a blank line
    if len(row) != len(names):
        return Invalid(f"{location}: {len(row)} fields for {len(names)} columns; fix the row")
    if options.rows:
        values = dict(zip(names, row, strict=True))
        problem = next(filter(None, map(_text_problem, row)), None)
        return Invalid(f"{location}: {problem}") if problem else Row(values, location)
    text = row[names.index(options.text_column)]
    problem = _text_problem(text)
    return Invalid(f"{location}: {problem}") if problem else text


def _text_problem(text: str) -> str | None:
    if "\0" in text:
        return f"{BINARY.name.removeprefix('file with ')} in a text; fix the row"
    if text.isascii():
        return None
    return utf8_problem(text.encode(errors="surrogateescape"))


@contextmanager
def _field_size_limit(limit: int) -> Iterator[None]:
    """Set the field size limit of the `csv` module, which is global to the process."""
    previous = csv.field_size_limit(limit + 1)
    try:
        yield
    finally:
        csv.field_size_limit(previous)


READER = FileReader(documents=_documents, suffixes=(".csv", ".tsv"))
