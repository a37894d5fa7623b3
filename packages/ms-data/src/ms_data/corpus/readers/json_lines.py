"""Reads JSON rows, one per line or as the items of one array."""

import codecs
import re
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import msgspec

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
from ms_data.corpus.unpacking import JSONArrayError, array_items, split_lines

_ROWS_BEGIN = re.compile(rb'\s*(?:\[\s*\{|\{\s*")')


def row_type(column: str) -> Any:
    """Return a struct type for JSON objects whose member `column` is a string."""
    return msgspec.defstruct("Row", [("text", str, msgspec.field(name=column))])


def json_decoder(options: ReadOptions) -> Callable[[bytes, str], ReadResult]:
    """Return a function that decodes one row from its JSON and its location in the file."""
    if options.rows:
        return _row
    decoder = msgspec.json.Decoder(row_type(options.text_column))

    def text(line: bytes, location: str) -> str:
        content: str = decoder.decode(line).text
        content.encode()
        return content

    return text


def decode_row(
    decode: Callable[[bytes, str], ReadResult], line: bytes, location: str, remedy: str
) -> ReadResult:
    """Decode a row; return `Invalid` if that fails."""
    try:
        return decode(line, location)
    except msgspec.ValidationError as error:
        return Invalid(f"{location}: {error}{remedy}")
    except (msgspec.DecodeError, UnicodeError) as error:
        reason = utf8_problem(line) or f"malformed JSON line: {error}; fix the line"
        return Invalid(f"{location}: {reason}")
    except RecursionError:
        return Invalid(f"{location}: its JSON is nested too deeply; fix the line")


def _row(line: bytes, location: str) -> ReadResult:
    row = msgspec.json.decode(line)
    if not isinstance(row, dict):
        return Invalid(f"{location}: a row must be a JSON object, got {type(row).__name__}")
    return Row(row, location)


def holds_rows(file: OpenFile, options: ReadOptions) -> bool:
    """Return whether a file whose suffix does not tell its format starts like JSON rows.

    It does if it starts with an array of rows, or with one or two lines of one row each. A row is
    an object; it must have the text column, unless rows are parsed or the user listed the .json
    file.
    """
    if not _ROWS_BEGIN.match(file.head.removeprefix(codecs.BOM_UTF8)):
        return False
    # Blocks that are read here are put back in front of the others below.
    limit, peeked = options.document_limit_bytes, list[bytes]()

    def peek() -> Iterator[bytes]:
        for block in file.blocks:
            peeked.append(block)
            yield block
            if sum(map(len, peeked)) > limit:
                return

    with_text = row_type(options.text_column)
    named = file.named and file.name.lower().endswith(".json")
    row_schema = dict[str, Any] if named or options.parse else with_text
    try:
        if _is_array(file):
            first_rows = list(islice(array_items(peek(), limit), 1))
        else:
            lines = (line for line in split_lines(peek(), limit) if line is None or line.strip())
            first_rows = list(islice(lines, 2))
            # A single object may be a document, such as a configuration file.
            row_schema = row_schema if len(first_rows) > 1 or options.parse else with_text
        for text in first_rows:
            if text is not None:  # None: too long, which the reader reports
                msgspec.json.decode(text.removeprefix(codecs.BOM_UTF8), type=row_schema)
        return bool(first_rows)
    except (ValueError, RecursionError):
        return False
    finally:
        file.blocks = chain(peeked, file.blocks)


def _is_array(file: OpenFile) -> bool:
    return file.head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[ReadResult]:
    decode, remedy = json_decoder(options), options.text_remedy
    split, unit = (array_items, ": item ") if _is_array(file) else (split_lines, ":")
    try:
        for number, text in enumerate(split(file.blocks, options.document_limit_bytes), 1):
            if number <= start:
                continue
            location = f"{file.path}{unit}{number}"
            if text is None:
                yield Invalid(f"{location}: {TOO_LONG}")
                continue
            if number == 1:
                text = text.removeprefix(codecs.BOM_UTF8)
            yield decode_row(decode, text, location, remedy) if text.strip() else ""
    except JSONArrayError as error:
        yield Invalid(f"{file.path}: {error}; download or write the file again")


READER = FileReader(
    documents=_documents, suffixes=(".jsonl", ".ndjson", ".jsonlines"), refuses_nul=True
)
