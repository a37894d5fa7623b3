"""Checks every byte of a dataset."""

from pathlib import Path

import msgspec
import numpy as np
import xxhash

from ms_data.dataset import read_index
from ms_data.errors import DamageError
from ms_data.format import Index, ShardEntry
from ms_data.shard import Shard

__all__ = ["Fault", "Report", "verify"]


class Fault(msgspec.Struct, frozen=True):
    """One thing that is not as it was written."""

    file: str
    part: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file}: {self.part}: {self.problem}"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify` found."""

    faults: tuple[Fault, ...]
    shards: int
    frames: int
    size_bytes: int

    @property
    def ok(self) -> bool:
        """Whether all bytes are as they were written."""
        return not self.faults


def verify(folder: str | Path) -> Report:
    """Reads and decodes the whole dataset in `folder` and reports all damage, by file and part.

    Raises:
        SettingError: the folder holds no dataset.
    """
    folder = Path(folder)
    try:
        index = read_index(folder)
    except DamageError as error:
        return Report(faults=(_fault(error),), shards=0, frames=0, size_bytes=0)
    faults = _check_tokenizer(folder, index)
    frames = 0
    for entry in index.shards:
        found, checked = _check_shard(folder, entry, index)
        faults += found
        frames += checked
    return Report(
        faults=tuple(faults),
        shards=len(index.shards),
        frames=frames,
        size_bytes=sum(entry.size_bytes for entry in index.shards),
    )


def _check_tokenizer(folder: Path, index: Index) -> list[Fault]:
    try:
        content = (folder / "tokenizer.json").read_bytes()
    except OSError as error:
        return [Fault("tokenizer.json", "file", f"cannot be read: {error.strerror}")]
    if xxhash.xxh3_128_hexdigest(content) != index.tokenizer:
        return [Fault("tokenizer.json", "file", "its checksum is not the one in the index")]
    return []


def _check_shard(folder: Path, entry: ShardEntry, index: Index) -> tuple[list[Fault], int]:
    """The faults of one shard, and how many of its frames were checked."""
    try:
        shard = Shard(folder, entry)
    except DamageError as error:
        return [_fault(error)], 0
    faults = []
    for number in range(shard.frames):
        try:
            frame = shard.read(number)
        except DamageError as error:
            faults.append(_fault(error))
            continue
        ends = frame.ends.astype(np.int64)
        if int(frame.tokens.max()) >= index.vocabulary_size:
            faults.append(Fault(entry.name, f"frame {number}", "a token is not in the vocabulary"))
        if ends.size and (ends[0] < 1 or ends[-1] > frame.tokens.size or (np.diff(ends) < 1).any()):
            faults.append(Fault(entry.name, f"frame {number}", "document ends are out of order"))
    return faults, shard.frames


def _fault(error: DamageError) -> Fault:
    return Fault(error.file, error.part, error.problem)
