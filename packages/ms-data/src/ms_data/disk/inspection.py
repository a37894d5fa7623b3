"""Describes a dataset from its index alone."""

from pathlib import Path
from typing import Any

import msgspec

from ms_data.disk.format import BUILD_FILE, MEDIA_SUFFIX, is_intact
from ms_data.disk.split import dataset_folder, read_index
from ms_data.errors import SettingError
from ms_data.files.untrusted import read_bytes

_LIMIT_BYTES = 1 << 20


class _BuildFile(msgspec.Struct):
    """The displayed part of build.json."""

    summary: dict[str, Any]


class SplitInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Size of one split."""

    shards: int
    documents: int
    tokens: int
    size_bytes: int
    media_size_bytes: int = 0
    """Size of the shards with its images and audio, not included in `size_bytes`."""


class DatasetInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a dataset."""

    folder: str
    fingerprint: str
    vocabulary_size: int
    token_type: str
    end_of_text: int
    tokenizer: str
    splits: dict[str, SplitInfo]
    build: dict[str, Any] | None = None
    """Summary of the build: skipped files and documents, start and end tokens. None for an imported
    dataset, or if build.json is damaged (see `verify`)."""


def inspect(folder: str | Path) -> DatasetInfo:
    """Describe the dataset in `folder`.

    Raises:
        SettingError: the folder holds no dataset.
        DamageError: the index is damaged.
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
        build=_read_summary(Path(folder) / BUILD_FILE),
    )


def _read_summary(path: Path) -> dict[str, Any] | None:
    """Return the summary in a build.json, or None."""
    try:
        content = read_bytes(path, error=SettingError, limit_bytes=_LIMIT_BYTES)
    except SettingError:
        return None
    if not is_intact(content):
        return None
    try:
        return msgspec.json.decode(content, type=_BuildFile).summary
    except msgspec.MsgspecError:
        return None
