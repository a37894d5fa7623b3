"""Reads rows of JSON, one per line or the items of one array: documents, or instruction rows."""

import codecs
import re
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import msgspec

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
from ms_data.corpus.unpacking import JSONArrayError, array_items, lines_of

_ROWS_BEGIN = re.compile(rb'\s*(?:\[\s*\{|\{\s*")')


def row_type(column: str) -> Any:
    """Return the type of a JSON object whose member `column` is a text."""
    return msgspec.defstruct("Row", [("text", str, msgspec.field(name=column))])


def json_decoder(options: ReadOptions) -> Callable[[bytes, str], Found]:
    """Make what reads a row from its JSON, which stands at a place."""
    if options.rows:
        return _row
    decoder = msgspec.json.Decoder(row_type(options.text_column))

    def text(line: bytes, place: str) -> str:
        found: str = decoder.decode(line).text
        found.encode()
        return found

    return text


def decoded(decode: Callable[[bytes, str], Found], line: bytes, place: str, remedy: str) -> Found:
    """Read a row, or say why there is none."""
    try:
        return decode(line, place)
    except msgspec.ValidationError as error:
        return Invalid(f"{place}: {error}{remedy}")
    except (msgspec.DecodeError, UnicodeError) as error:
        reason = not_utf8(line) or f"malformed JSON line: {error}; mend the line"
        return Invalid(f"{place}: {reason}")
    except RecursionError:
        return Invalid(f"{place}: its JSON is nested too deeply; mend the line")


def _row(line: bytes, place: str) -> Found:
    row = msgspec.json.decode(line)
    if not isinstance(row, dict):
        return Invalid(f"{place}: a row must be a JSON object, not {type(row).__name__}")
    return Row(row, place)


def holds_rows(file: OpenFile, options: ReadOptions) -> bool:
    """Return whether a file that no name tells apart holds rows of JSON, by how it begins.

    It does where it begins with an array of rows, or with one or two lines of a row each. A row is
    an object; one with the text column, unless rows are parsed or the user named a .json file.
    """
    if not _ROWS_BEGIN.match(file.head.removeprefix(codecs.BOM_UTF8)):
        return False
    limit, peeked = options.document_limit_bytes, list[bytes]()

    def peek() -> Iterator[bytes]:
        for block in file.blocks:
            peeked.append(block)
            yield block
            if sum(map(len, peeked)) > limit:
                return

    with_text = row_type(options.text_column)
    named = file.named and file.name.lower().endswith(".json")
    row = dict[str, Any] if named or options.parse else with_text
    try:
        if _is_array(file):
            first = list(islice(array_items(peek(), limit), 1))
        else:
            lines = (line for line in lines_of(peek(), limit) if line is None or line.strip())
            first = list(islice(lines, 2))
            # One object alone may be a document, such as a file of settings.
            row = row if len(first) > 1 or options.parse else with_text
        for text in first:
            if text is not None:  # too long, which its reader reports
                msgspec.json.decode(text.removeprefix(codecs.BOM_UTF8), type=row)
        return bool(first)
    except (ValueError, RecursionError):
        return False
    finally:
        file.blocks = chain(peeked, file.blocks)


def _is_array(file: OpenFile) -> bool:
    return file.head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[Found]:
    decode, remedy = json_decoder(options), options.text_remedy
    split, unit = (array_items, ": item ") if _is_array(file) else (lines_of, ":")
    try:
        for number, text in enumerate(split(file.blocks, options.document_limit_bytes), 1):
            if number <= start:
                continue
            place = f"{file.path}{unit}{number}"
            if text is None:
                yield Invalid(f"{place}: {TOO_LONG}")
                continue
            if number == 1:
                text = text.removeprefix(codecs.BOM_UTF8)
            yield decoded(decode, text, place, remedy) if text.strip() else ""
    except JSONArrayError as error:
        yield Invalid(f"{file.path}: {error}; fetch the file or write it again")


READER = FileReader(
    documents=_documents, suffixes=(".jsonl", ".ndjson", ".jsonlines"), refuses_nul=True
)
