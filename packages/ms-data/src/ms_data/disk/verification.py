"""Checks every byte of a dataset."""

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from ms_data.disk.format import (
    BUILD_FILE,
    KINDS,
    LOSS_BIT,
    MAGIC,
    Index,
    ShardEntry,
    seal_holds,
    sealed_files,
)
from ms_data.disk.shard import Frame, Shard
from ms_data.disk.split import dataset_folder, read_index
from ms_data.errors import DamageError, SettingError
from ms_data.files.untrusted import open_file

_PIECE_BYTES = 1 << 17
"""About what a frame takes on disk at most."""


class Fault(msgspec.Struct, frozen=True):
    """One thing that is not as it was written."""

    file: str
    part: str
    """The damaged part, such as `frame 12`, `frame table` or `footer`."""
    problem: str

    def __str__(self) -> str:
        return f"{self.file}: {self.part}: {self.problem}"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify` found."""

    faults: tuple[Fault, ...]
    shards: int
    frames: int
    """Frames that were decoded."""
    size_bytes: int
    """Bytes of all shards."""
    unchecked: tuple[str, ...] = ()
    """Other files of the folder, which the index knows nothing of."""

    @property
    def ok(self) -> bool:
        """Whether all bytes of the dataset are as they were written."""
        return not self.faults


def verify(
    folder: str | Path, *, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> Report:
    """Read and decode the whole dataset in `folder` and report all damage, by file and part.

    Args:
        folder: a folder that `build` wrote.
        on_progress: called with the bytes that are checked, and all, after each shard.

    Raises:
        SettingError: the folder holds no dataset.
    """
    folder = dataset_folder(folder)
    try:
        index = read_index(folder)
    except DamageError as error:
        return Report(faults=(_fault(error),), shards=0, frames=0, size_bytes=0)
    total = sum(entry.size_bytes for entry in index.shards)
    faults = _check_files(folder, index)
    frames = done = 0
    # Reading, checksums and zstd let go of the interpreter, so threads use all cores.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda entry: _check_shard(folder, entry, index), index.shards)
        for entry, (found, checked) in zip(index.shards, results, strict=True):
            faults += found
            frames += checked
            done += entry.size_bytes
            on_progress(done, total)
    return Report(
        faults=tuple(faults),
        shards=len(index.shards),
        frames=frames,
        size_bytes=total,
        unchecked=_unchecked(folder, index),
    )


def _unchecked(folder: Path, index: Index) -> tuple[str, ...]:
    """Name what is in the folder and is not part of the dataset."""
    known = {"index.json", BUILD_FILE, *(entry.name for entry in index.shards)}
    known |= {name for names, _ in sealed_files(index) for name in names}
    return tuple(sorted(path.name for path in folder.iterdir() if path.name not in known))


def _check_files(folder: Path, index: Index) -> list[Fault]:
    """Check build.json, the tokenizer and, of an instruction set, the files of its template."""
    record = folder / BUILD_FILE
    try:
        # Imported datasets have none.
        if record.exists() and not seal_holds(_read(record)):
            return [Fault(BUILD_FILE, "file", "its checksum does not match its content")]
    except OSError as error:
        return [Fault(BUILD_FILE, "file", f"cannot be read: {error.strerror}")]
    for names, expected in sealed_files(index):
        content = b""
        for name in names:
            try:
                content += _read(folder / name)
            except OSError as error:
                return [Fault(name, "file", f"cannot be read: {error.strerror}")]
        if xxhash.xxh3_128_hexdigest(content) != expected:
            others = "".join(f"with {name}, " for name in names[:-1])
            return [Fault(names[-1], "file", f"{others}its checksum is not the one in the index")]
    return []


def _check_shard(folder: Path, entry: ShardEntry, index: Index) -> tuple[list[Fault], int]:
    """Find the faults of one shard, and count its frames that were decoded."""
    try:
        shard = Shard(folder, entry, index.frame_tokens)
    except DamageError as error:
        cut = _frame_cut_off(folder / entry.name, entry)
        return [Fault(error.file, cut or error.part, error.problem)], 0
    faults: list[Fault] = []
    decoded = 0
    position: int | None = 0
    for number in range(shard.frames):
        try:
            frame = shard.read(number)
        except DamageError as error:
            faults.append(_fault(error))
            position = None
            continue
        decoded += 1
        if problem := _inconsistency(frame, position, index, media=entry.holds_media):
            faults.append(Fault(entry.name, f"frame {number}", problem))
        position = _position_after(frame)
    if position:
        faults.append(Fault(entry.name, "footer", "the last document has no end"))
    shard.close()
    return faults, decoded


def _inconsistency(frame: Frame, position: int | None, index: Index, *, media: bool) -> str | None:
    """Find what cannot be in a frame whose bytes are those that were written."""
    text = index.document_kind == "text"
    tokens = frame.tokens if text else _without_headers(frame, index)
    if not media and tokens.size and int(tokens.max()) >= index.vocabulary_size:
        return "a token is outside the vocabulary"
    if text and (frame.tokens[frame.ends - 1] != index.end_of_text).any():
        return "a document does not end in the end of text"
    if position is not None and frame.position != position:
        return "it does not go on where the frame before it stops"
    return None


def _without_headers(frame: Frame, index: Index) -> NDArray[np.unsignedinteger]:
    """Return the tokens of conversations or pairs, whose documents have a header each."""
    starts = np.concatenate(([-frame.position], frame.ends[frame.ends < len(frame.tokens)]))
    place = np.arange(len(frame.tokens))
    place -= np.repeat(starts, np.diff(np.maximum(starts, 0), append=len(frame.tokens)))
    return frame.tokens[place >= KINDS[index.document_kind].header_words] & ~LOSS_BIT


def _position_after(frame: Frame) -> int:
    if frame.ends.size:
        return int(frame.tokens.size - frame.ends[-1])
    return frame.position + int(frame.tokens.size)


def _read(path: Path) -> bytes:
    try:
        with open_file(path, error=SettingError) as file:
            return file.readall()
    except SettingError as error:
        raise OSError(errno.EINVAL, "not a file") from error


def _frame_cut_off(path: Path, entry: ShardEntry) -> str | None:
    """Name the frame in which a shortened file ends, by unpacking what is there."""
    try:
        content = _read(path)
    except OSError:
        return None
    if not len(MAGIC) <= len(content) < entry.size_bytes:
        return None
    number, at = 0, len(MAGIC)
    while True:
        unpacker = zstandard.ZstdDecompressor().decompressobj()
        while not unpacker.eof:
            piece = content[at : at + _PIECE_BYTES]
            if not piece:
                return f"frame {number}"
            try:
                unpacker.decompress(piece)
            except zstandard.ZstdError:
                return None  # all frames are there: it is the table that is cut
            at += len(piece)
        number, at = number + 1, at - len(unpacker.unused_data)


def _fault(error: DamageError) -> Fault:
    return Fault(error.file, error.part, error.problem)
