"""Reads tables of text: rows of fields, with a comma or a tab between, below a line of names."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager

from ms_data.corpus.file_kinds import BINARY
from ms_data.corpus.reader import (
    TOO_LONG,
    FileReader,
    Found,
    Invalid,
    OpenFile,
    ReadOptions,
    Row,
    not_utf8,
)
from ms_data.corpus.unpacking import lines_of


class _TooLongError(Exception):
    """A row has more bytes than a document may have."""


class _Lines(Iterator[str]):
    """The lines of a file, each with its end, and how long the row is that they make."""

    def __init__(self, blocks: Iterator[bytes], limit: int) -> None:
        self._lines = lines_of(blocks, limit)
        self._limit = limit
        self._first = True
        self.row_bytes = 0

    def __next__(self) -> str:
        line = next(self._lines)
        self.row_bytes += self._limit + 1 if line is None else len(line)
        if line is None or self.row_bytes > self._limit:
            raise _TooLongError
        mark, self._first = self._first, False
        # What is no UTF-8 is said of its row.
        return line.decode("utf-8-sig" if mark else "utf-8", "surrogateescape") + "\n"


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[Found]:
    delimiter = "\t" if file.name.lower().endswith(".tsv") else ","
    limit = options.document_limit_bytes
    lines = _Lines(file.blocks, limit)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    names: list[str] | None = None
    number = 0
    while True:
        lines.row_bytes = 0
        found: Found | list[str]
        try:
            with _fields_of(limit):
                found = next(rows)
        except StopIteration:
            return
        except _TooLongError:
            yield Invalid(f"{file.path}: row {number}: {TOO_LONG}; what follows it is not read")
            return
        except csv.Error as error:
            found = Invalid(f"{file.path}: row {number}: malformed: {error}; mend the row")
        if names is None:
            problem = _names_problem(found, options)
            if problem:
                yield Invalid(f"{file.path}: {problem}")
                return
            names, number = list(found), 1
            continue
        if number > start:
            yield _document(found, names, f"{file.path}: row {number}", options)
        number += 1


def _names_problem(found: Found | list[str], options: ReadOptions) -> str | None:
    """Say why the first line does not name the columns."""
    if not isinstance(found, list) or not found:
        return "no names of columns in its first line; write them there"
    name = options.text_column
    if options.parse is None and found.count(name) != 1:
        have = ", ".join(found[:20])
        many = "no column" if name not in found else f"{found.count(name)} columns"
        return f"{many} {name!r}; it has: {have}{options.text_remedy}"
    return None


def _document(
    found: Found | list[str], names: list[str], place: str, options: ReadOptions
) -> Found:
    if not isinstance(found, list):
        return found
    if not found:
        return ""  # a blank line
    if len(found) != len(names):
        return Invalid(f"{place}: {len(found)} fields below {len(names)} names; mend the row")
    if options.rows:
        values = dict(zip(names, found, strict=True))
        problem = next(filter(None, map(_text_problem, found)), None)
        return Invalid(f"{place}: {problem}") if problem else Row(values, place)
    text = found[names.index(options.text_column)]
    problem = _text_problem(text)
    return Invalid(f"{place}: {problem}") if problem else text


def _text_problem(text: str) -> str | None:
    if "\0" in text:
        return f"{BINARY.name.removeprefix('file with ')} in a text; mend the row"
    if text.isascii():
        return None
    return not_utf8(text.encode(errors="surrogateescape"))


@contextmanager
def _fields_of(limit: int) -> Iterator[None]:
    """Let the module `csv` read fields up to a limit, which is one for the whole process."""
    before = csv.field_size_limit(limit + 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


READER = FileReader(documents=_documents, suffixes=(".csv", ".tsv"))
