"""Reads files of UTF-8 text: each is one document."""

import codecs
from collections.abc import Iterator

from ms_data.corpus.file_kinds import BINARY
from ms_data.corpus.reader import (
    FileReader,
    Found,
    Invalid,
    OpenFile,
    ReadOptions,
    not_utf8,
)


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[Found]:
    if start:
        return
    content = file.whole(options.document_limit_bytes)
    if isinstance(content, Invalid):
        yield content
    elif b"\0" in content:
        yield BINARY
    elif reason := not_utf8(content):
        yield Invalid(f"{file.path}: {reason}")
    else:
        yield content.removeprefix(codecs.BOM_UTF8).decode()


READER = FileReader(documents=_documents)
"""It claims no name: a file that no other reader claims is text."""
