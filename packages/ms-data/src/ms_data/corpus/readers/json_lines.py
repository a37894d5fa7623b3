"""Reads JSON Lines: each line is a document, or a row of an instruction set."""

import codecs
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ms_data.corpus.reader import (
    TOO_LONG,
    Found,
    Invalid,
    OpenFile,
    Reader,
    ReadOptions,
    not_utf8,
)
from ms_data.corpus.unpacking import lines_of
from ms_data.errors import TokenizerError


def row_type(key: str) -> Any:
    """The type of a JSON object whose member `key` is a text."""
    return msgspec.defstruct("Row", [("text", str, msgspec.field(name=key))])


def _documents(file: OpenFile, options: ReadOptions) -> Iterator[Found]:
    parse = options.parse or _text_of(options.text_key)
    for number, line in enumerate(lines_of(file.blocks, options.document_limit_bytes), 1):
        place = f"{file.path}:{number}"
        if line is None:
            yield Invalid(f"{place}: {TOO_LONG}")
            continue
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            yield ""
            continue
        try:
            yield parse(line)
        except TokenizerError as error:  # of the template, not of the row: nothing to leave out
            raise TokenizerError(f"{place}: {error}") from error
        except msgspec.ValidationError as error:
            remedy = "" if options.parse else "; name the text's key with --text-key"
            yield Invalid(f"{place}: {error}{remedy}")
        except (msgspec.DecodeError, UnicodeError) as error:
            reason = not_utf8(line) or f"malformed JSON line: {error}; mend the line"
            yield Invalid(f"{place}: {reason}")
        except ValueError as error:
            yield Invalid(f"{place}: {error}")
        except RecursionError:
            yield Invalid(f"{place}: its JSON is nested too deeply; mend the line")


def _text_of(key: str) -> Callable[[bytes], str]:
    decoder = msgspec.json.Decoder(row_type(key))

    def parse(line: bytes) -> str:
        text: str = decoder.decode(line).text
        text.encode()
        return text

    return parse


READER = Reader(documents=_documents, suffixes=(".jsonl", ".ndjson"), rows=True)
