"""Reads Python sources, decoded by their encoding cookie like the interpreter does."""

import io
import tokenize
from collections.abc import Iterator

from ms_data.corpus.reader import FileReader, Invalid, OpenFile, ReadOptions, ReadResult


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[ReadResult]:
    if start:
        return
    content = file.read_all(options.document_limit_bytes)
    if isinstance(content, Invalid):
        yield content
        return
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        yield content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        yield Invalid(f"{file.path}: {error}")


READER = FileReader(documents=_documents)
"""Claims no file names: in a user's folder, Python sources are plain text."""
