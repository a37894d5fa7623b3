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

from ms_data.arguments import check_callable
from ms_data.disk.format import (
    BUILD_FILE,
    DOCUMENT_KINDS,
    LOSS_BIT,
    MAGIC,
    Index,
    ShardEntry,
    checksummed_files,
    is_intact,
)
from ms_data.disk.shard import Frame, Shard
from ms_data.disk.split import dataset_folder, read_index
from ms_data.errors import DamageError, SettingError
from ms_data.files.untrusted import open_file

_PIECE_BYTES = 1 << 17
"""Read size, about the largest compressed frame."""


class Fault(msgspec.Struct, frozen=True):
    """A damaged part of a dataset."""

    file: str
    part: str
    """Damaged part, such as `frame 12`, `frame table` or `footer`."""
    problem: str

    def __str__(self) -> str:
        return f"{self.file}: {self.part}: {self.problem}"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `verify`."""

    faults: tuple[Fault, ...]
    shards: int
    frames: int
    """Number of decoded frames."""
    size_bytes: int
    """Total size of all shards."""
    unchecked: tuple[str, ...] = ()
    """Other files in the folder, which are not part of the dataset."""

    @property
    def ok(self) -> bool:
        """Whether the dataset is undamaged."""
        return not self.faults


def verify(
    folder: str | Path, *, on_progress: Callable[[int, int], None] = lambda bytes_done, total: None
) -> Report:
    """Read and decode the dataset in `folder` completely, and report all damage by file and part.

    Args:
        folder: output folder of `build`.
        on_progress: called after every shard with the bytes checked so far and the total.

    Raises:
        SettingError: the folder holds no dataset.
    """
    check_callable("on_progress", on_progress, error=SettingError)
    folder = dataset_folder(folder)
    try:
        index = read_index(folder)
    except DamageError as error:
        return Report(faults=(_fault(error),), shards=0, frames=0, size_bytes=0)
    total = sum(entry.size_bytes for entry in index.shards)
    faults = _check_files(folder, index)
    frames = bytes_done = 0
    # Reading, checksums and zstd release the GIL, so threads use all cores.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda entry: _check_shard(folder, entry, index), index.shards)
        for entry, (shard_faults, shard_frames) in zip(index.shards, results, strict=True):
            faults += shard_faults
            frames += shard_frames
            bytes_done += entry.size_bytes
            on_progress(bytes_done, total)
    return Report(
        faults=tuple(faults),
        shards=len(index.shards),
        frames=frames,
        size_bytes=total,
        unchecked=_unchecked(folder, index),
    )


def _unchecked(folder: Path, index: Index) -> tuple[str, ...]:
    """Return the names of the files in the folder that are not part of the dataset."""
    dataset_files = {"index.json", BUILD_FILE, *(entry.name for entry in index.shards)}
    dataset_files |= {name for names, _ in checksummed_files(index) for name in names}
    return tuple(sorted(path.name for path in folder.iterdir() if path.name not in dataset_files))


def _check_files(folder: Path, index: Index) -> list[Fault]:
    """Check build.json, the tokenizer, and the chat template of instruction datasets."""
    record = folder / BUILD_FILE
    try:
        # Imported datasets have no build.json.
        if record.exists() and not is_intact(_read(record)):
            return [Fault(BUILD_FILE, "file", "checksum mismatch")]
    except OSError as error:
        return [Fault(BUILD_FILE, "file", f"cannot be read: {error.strerror}")]
    for names, expected in checksummed_files(index):
        content = b""
        for name in names:
            try:
                content += _read(folder / name)
            except OSError as error:
                return [Fault(name, "file", f"cannot be read: {error.strerror}")]
        if xxhash.xxh3_128_hexdigest(content) != expected:
            others = "".join(f"with {name}, " for name in names[:-1])
            return [Fault(names[-1], "file", f"{others}checksum differs from the index")]
    return []


def _check_shard(folder: Path, entry: ShardEntry, index: Index) -> tuple[list[Fault], int]:
    """Return the faults of one shard and the number of its decoded frames."""
    try:
        shard = Shard(folder, entry, index.frame_tokens)
    except DamageError as error:
        truncated_frame = _truncated_frame(folder / entry.name, entry)
        return [Fault(error.file, truncated_frame or error.part, error.problem)], 0
    faults: list[Fault] = []
    decoded = 0
    position: int | None = 0  # expected position of the next frame; None after a damaged one
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
        faults.append(Fault(entry.name, "footer", "the last document is not terminated"))
    shard.close()
    return faults, decoded


def _inconsistency(frame: Frame, position: int | None, index: Index, *, media: bool) -> str | None:
    """Return a logical error in a frame whose checksum is correct, or None."""
    text = index.document_kind == "text"
    tokens = frame.tokens if text else _drop_headers(frame, index)
    if not media and tokens.size and int(tokens.max()) >= index.vocabulary_size:
        return "a token is outside the vocabulary"
    if text and (frame.tokens[frame.ends - 1] != index.end_of_text).any():
        return "a document does not end with the end-of-text token"
    if position is not None and frame.position != position:
        return "it does not continue the previous frame"
    return None


def _drop_headers(frame: Frame, index: Index) -> NDArray[np.unsignedinteger]:
    """Return the tokens of conversations or pairs, without the header of each document."""
    # Start of each document; negative for the one continued from the previous frame.
    starts = np.concatenate(([-frame.position], frame.ends[frame.ends < len(frame.tokens)]))
    position = np.arange(len(frame.tokens))  # within the document
    position -= np.repeat(starts, np.diff(np.maximum(starts, 0), append=len(frame.tokens)))
    return frame.tokens[position >= DOCUMENT_KINDS[index.document_kind].header_words] & ~LOSS_BIT


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


def _truncated_frame(path: Path, entry: ShardEntry) -> str | None:
    """Return the frame in which a truncated file ends, by decompressing the file."""
    try:
        content = _read(path)
    except OSError:
        return None
    if not len(MAGIC) <= len(content) < entry.size_bytes:
        return None
    # Frames are separate zstd frames, so their ends are found by decompressing them in order.
    number, offset = 0, len(MAGIC)
    while True:
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        while not decompressor.eof:
            piece = content[offset : offset + _PIECE_BYTES]
            if not piece:
                return f"frame {number}"
            try:
                decompressor.decompress(piece)
            except zstandard.ZstdError:
                return None  # all frames are complete; the file ends in the table
            offset += len(piece)
        number, offset = number + 1, offset - len(decompressor.unused_data)


def _fault(error: DamageError) -> Fault:
    return Fault(error.file, error.part, error.problem)
