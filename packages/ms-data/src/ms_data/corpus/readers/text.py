"""Reads UTF-8 text files, one document per file."""

import codecs
from collections.abc import Iterator

from ms_data.corpus.file_kinds import BINARY
from ms_data.corpus.reader import (
    FileReader,
    Invalid,
    OpenFile,
    ReadOptions,
    ReadResult,
    utf8_problem,
)


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[ReadResult]:
    if start:
        return
    content = file.read_all(options.document_limit_bytes)
    if isinstance(content, Invalid):
        yield content
    elif b"\0" in content:
        yield BINARY
    elif reason := utf8_problem(content):
        yield Invalid(f"{file.path}: {reason}")
    else:
        yield content.removeprefix(codecs.BOM_UTF8).decode()


READER = FileReader(documents=_documents)
"""Claims no file names: any file that no other reader claims is text."""
