"""Describes a dataset from its index alone."""

from pathlib import Path
from typing import Any

import msgspec

from ms_data.disk.format import BUILD_FILE, MEDIA_SUFFIX, seal_holds
from ms_data.disk.split import dataset_folder, read_index
from ms_data.errors import SettingError
from ms_data.files.untrusted import read_bytes

_LIMIT_BYTES = 1 << 20


class _Record(msgspec.Struct):
    """The part of a build.json that is shown."""

    summary: dict[str, Any]


class SplitInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One split of a dataset."""

    shards: int
    documents: int
    tokens: int
    size_bytes: int
    media_size_bytes: int = 0
    """Shards of its pictures and sounds, which the others do not count."""


class DatasetInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A dataset in a few numbers."""

    folder: str
    fingerprint: str
    vocabulary_size: int
    token_type: str
    end_of_text: int
    tokenizer: str
    splits: dict[str, SplitInfo]
    build: dict[str, Any] | None = None
    """The summary of the build: what was left out, and how documents begin and end. None for a
    dataset that was imported, or whose build.json is damaged (see `verify`)."""


def inspect(folder: str | Path) -> DatasetInfo:
    """Describe the dataset in `folder`.

    Raises:
        SettingError: the folder holds no dataset.
        DamageError: its index is not what was written.
    """
    index = read_index(dataset_folder(folder))
    splits = {}
    for name in index.splits:
        shards = [shard for shard in index.shards if shard.split == name]
        splits[name] = SplitInfo(
            shards=len(shards),
            documents=sum(shard.documents for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
            size_bytes=sum(shard.size_bytes for shard in shards),
            media_size_bytes=sum(
                shard.size_bytes for shard in index.shards if shard.split == name + MEDIA_SUFFIX
            ),
        )
    return DatasetInfo(
        folder=str(folder),
        fingerprint=index.fingerprint,
        vocabulary_size=index.vocabulary_size,
        token_type=index.token_type,
        end_of_text=index.end_of_text,
        tokenizer=index.tokenizer,
        splits=splits,
        build=_summary(Path(folder) / BUILD_FILE),
    )


def _summary(path: Path) -> dict[str, Any] | None:
    """Read the summary in a build.json."""
    try:
        content = read_bytes(path, error=SettingError, limit_bytes=_LIMIT_BYTES)
    except SettingError:
        return None
    if not seal_holds(content):
        return None
    try:
        return msgspec.json.decode(content, type=_Record).summary
    except msgspec.MsgspecError:
        return None
