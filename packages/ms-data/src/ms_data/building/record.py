"""What a build notes beside its shards, so that the same command again has nothing to do."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import xxhash

from ms_data.building.journal import Recipe
from ms_data.corpus.corpus import Corpus
from ms_data.disk.split import read_index
from ms_data.errors import DataError, OutputError, shown
from ms_data.files.untrusted import decode_json, read_bytes

__all__ = ["BUILD_FILE", "Finished", "Summary", "encode_finished", "left_out_words", "summary_of"]

BUILD_FILE = "build.json"
LIMIT_BYTES = 1 << 20


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a build wrote."""

    folder: str
    documents: int
    tokens: int
    shards: int
    size_bytes: int
    """All shards together."""
    text_bytes: int
    """The documents as UTF-8."""
    skipped: int
    """Documents left out because they are not valid text."""
    left_out: dict[str, int]
    """Files of a folder left out because they are no text, by what they are."""
    splits: dict[str, int]
    """Tokens in each split."""
    built_before: bool = False
    """Whether all of it was there already, so that nothing was done."""

    @property
    def omissions(self) -> str:
        """What was left out, as a part of a line; empty where nothing was."""
        skipped = f", {self.skipped:,} invalid ones left out" if self.skipped else ""
        return skipped + left_out_words(self.left_out)


def left_out_words(left_out: Mapping[str, int]) -> str:
    """How many files are no text and what they are, as a part of a line; empty where none is."""
    count = sum(left_out.values())
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in sorted(left_out.items()))
    files = "file" if count == 1 else "files"
    return f", {count:,} {files} left out as no text ({kinds})" if count else ""


class Finished(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ms-data.build.1"
):
    """What a dataset was built from, and with which settings."""

    recipe: Recipe
    skip_invalid: bool
    document_limit_bytes: int
    listing: str
    """Names and sizes of the files of the corpus, as a checksum."""
    content: str
    """Their bytes, as a checksum."""
    summary: Summary
    checksum: str = ""
    """Hexadecimal xxh3-128 of the rest."""

    def differences(self, other: "Finished") -> list[str]:
        """What `other` was asked for otherwise, a line's part each."""
        found = self.recipe.differences(other.recipe)
        if self.skip_invalid != other.skip_invalid:
            found.append(f"skip_invalid is {other.skip_invalid}, was {self.skip_invalid}")
        if self.listing != other.listing:
            found.append("the corpus has other files, or other content")
        return found


def encode_finished(finished: Finished) -> bytes:
    """The one byte string that stands for it, checksum filled in."""
    bare = msgspec.structs.replace(finished, checksum="")
    checksum = xxhash.xxh3_128_hexdigest(msgspec.json.encode(bare))
    filled = msgspec.structs.replace(finished, checksum=checksum)
    return msgspec.json.format(msgspec.json.encode(filled), indent=1) + b"\n"


def summary_of(folder: Path, wanted: Finished, source: Corpus, out: str | Path) -> Summary | None:
    """The summary of the build that stands whole in `folder`, if it is the one that is wanted.

    Raises:
        OutputError: it is another one, and which setting differs; or its shards are damaged.
    """
    path = folder / BUILD_FILE
    if not os.path.exists(path) or not os.path.exists(folder / "index.json"):
        return None
    content = read_bytes(path, error=OutputError, limit_bytes=LIMIT_BYTES)
    before = decode_json(content, Finished, where=path, error=OutputError)
    if encode_finished(before) != content:
        raise OutputError(f"{shown(path)}: damaged; remove {shown(out)} to build anew")
    differing = before.differences(wanted)
    changed = source.changed_since(path.stat().st_mtime_ns)
    if changed and not differing and source.content() != before.content:
        differing.append(f"the corpus has other content, as {shown(changed)} may")
    if differing:
        raise OutputError(
            f"{shown(out)} is not empty: it holds another build: "
            f"{'; '.join(differing)}; choose another folder, or remove it"
        )
    _check_sizes(folder, out)
    return msgspec.structs.replace(before.summary, folder=str(out), built_before=True)


def _check_sizes(folder: Path, out: str | Path) -> None:
    try:
        shards = read_index(folder).shards
    except DataError as error:
        raise OutputError(f"{error}; or remove {shown(out)} to build anew") from error
    for shard in shards:
        path = folder / shard.name
        size = path.stat().st_size if path.exists() else 0
        if size != shard.size_bytes:
            raise OutputError(
                f"{shown(path)}: damaged: {size} bytes where {shard.size_bytes} were written; "
                f"remove {shown(out)} to build anew"
            )
