"""Reads Python's sources, decoded as the interpreter does, by their encoding cookie."""

import io
import tokenize
from collections.abc import Iterator

from ms_data.corpus.reader import FileReader, Found, Invalid, OpenFile, ReadOptions


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[Found]:
    if start:
        return
    content = file.whole(options.document_limit_bytes)
    if isinstance(content, Invalid):
        yield content
        return
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        yield content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        yield Invalid(f"{file.path}: {error}")


READER = FileReader(documents=_documents)
"""It claims no name: in a user's folder, a source is text like any other."""
