"""How far a build has come, kept beside its shards so that a killed build can go on."""

import os
from pathlib import Path

import msgspec

from ms_data.disk.format import checksum
from ms_data.disk.writer import DatasetState
from ms_data.errors import OutputError
from ms_data.files.durable import write_file
from ms_data.files.untrusted import read_bytes

__all__ = ["Journal", "Recipe", "load_journal", "save_journal"]

_CHECKSUM_BYTES = 8


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides the bytes of a dataset, apart from the corpus."""

    tokenizer: str
    end_of_text: int
    hold_out: float
    shard_size_bytes: int
    text_key: str
    libraries: str
    """Versions of tokenizers and zstandard."""
    chat: str = ""
    """Template, kind and settings of an instruction set, as a checksum; empty for text."""

    def differences(self, other: "Recipe") -> list[str]:
        """What `other` says otherwise, a line's part each."""
        return [
            f"{_NAMES.get(name, name)} is {_said(getattr(other, name))}, was "
            f"{_said(getattr(self, name))}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]


_NAMES = {"chat": "the chat template or its settings", "tokenizer": "the tokenizer's checksum"}


def _said(value: object) -> str:
    return repr(value) if value != "" else "not given"


class Journal(msgspec.Struct, frozen=True, kw_only=True, tag="ms-data.journal.2"):
    """One moment of a build at which everything counted here is safely on disk."""

    recipe: Recipe
    skip_invalid: bool
    document_limit_bytes: int
    file: int
    """Files of the corpus that are done."""
    documents: int
    """Documents that are done of the file after them."""
    files_read: str
    """Names, sizes and times of the files that were read so far, as a checksum."""
    text_bytes: int
    skipped: int
    left_out: dict[str, int]
    """Files that are no text, by what they are."""
    dataset: DatasetState


def save_journal(path: Path, journal: Journal) -> None:
    """Writes a journal whole or not at all.

    Raises:
        OutputError: the disk is full or the place cannot be written.
    """
    content = msgspec.msgpack.encode(journal)
    write_file(path, checksum(content).to_bytes(_CHECKSUM_BYTES, "little") + content)


def load_journal(path: Path) -> Journal | None:
    """The journal of an interrupted build, or None where there is none.

    Raises:
        OutputError: the journal is damaged.
    """
    if not os.path.lexists(path):
        return None
    content = read_bytes(path, error=OutputError)
    body = content[_CHECKSUM_BYTES:]
    try:
        if checksum(body) != int.from_bytes(content[:_CHECKSUM_BYTES], "little"):
            raise ValueError("its checksum does not match")
        return msgspec.msgpack.decode(body, type=Journal)
    except (ValueError, RecursionError) as error:
        raise OutputError(
            f"{path}: damaged ({error}); remove {path.parent} to build anew"
        ) from error
