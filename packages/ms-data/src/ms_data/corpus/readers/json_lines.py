"""Reads JSON Lines: each line is a document, or a row of an instruction set."""

import codecs
from collections.abc import Callable, Iterator
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
from ms_data.corpus.unpacking import lines_of


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


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[Found]:
    decode, remedy = json_decoder(options), options.text_remedy
    for number, line in enumerate(lines_of(file.blocks, options.document_limit_bytes), 1):
        if number <= start:
            continue
        place = f"{file.path}:{number}"
        if line is None:
            yield Invalid(f"{place}: {TOO_LONG}")
            continue
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        yield decoded(decode, line, place, remedy) if line.strip() else ""


READER = FileReader(
    documents=_documents, suffixes=(".jsonl", ".ndjson", ".jsonlines"), refuses_nul=True
)
