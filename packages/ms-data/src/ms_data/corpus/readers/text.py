"""Reads files of UTF-8 text: each is one document."""

import codecs
from collections.abc import Iterator
from typing import Any

import msgspec

from ms_data.corpus.file_kinds import BINARY
from ms_data.corpus.reader import (
    FileReader,
    Found,
    Invalid,
    OpenFile,
    ReadOptions,
    not_utf8,
)
from ms_data.corpus.readers.json_lines import row_type


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[Found]:
    if start:
        return
    content = file.whole(options.document_limit_bytes)
    if isinstance(content, Invalid):
        yield content
        return
    if b"\0" in content:
        yield BINARY
        return
    row = dict[str, Any] if file.named else row_type(options.text_column)
    if file.name.lower().endswith(".json") and (rows := _rows_of(content, row)):
        yield Invalid(f"{file.path} holds {rows}")
    elif reason := not_utf8(content):
        yield Invalid(f"{file.path}: {reason}")
    else:
        yield content.removeprefix(codecs.BOM_UTF8).decode()


def _rows_of(content: bytes, kind: Any) -> str | None:
    """Say why a file of JSON is rows and no document, or None if it is one document."""
    body = content.removeprefix(codecs.BOM_UTF8).strip()
    try:
        if body.startswith(b"["):
            if msgspec.json.decode(body, type=list[kind]):
                return "an array of rows; make a row a line of it with `jq -c '.[]'`, named .jsonl"
        elif b"\n" in body:
            for line in body.split(b"\n", 2)[:2]:
                msgspec.json.decode(line, type=kind)
            return "a JSON object a line; name it .jsonl"
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    return None


READER = FileReader(documents=_documents)
"""It claims no name: a file that no other reader claims is text."""
