"""Describes a dataset from its index alone."""

from pathlib import Path

import msgspec

from ms_data.disk.format import MEDIA_SUFFIX
from ms_data.disk.split import dataset_folder, read_index


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
    )
