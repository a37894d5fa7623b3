"""Test the output folder: whether it can be written, how fast, and whether all ranks share it."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

import msgspec
import torch
import torch.distributed as dist

from ms_profile.doctor.clocks import gather_bytes
from ms_profile.doctor.recording import Folder

SIZE_BYTES, CHUNK_BYTES = 64 << 20, 4 << 20
PREFIX: Final = ".doctor-"
VISIBLE_S: Final = 10.0
"""Seconds to wait for a file written by another rank; network folders may show it late."""


def measure_folders(
    folder: Path, *, size_bytes: int = SIZE_BYTES, timeout_s: float = VISIBLE_S
) -> list[Folder]:
    """Test the output folder on each rank. Collective; rank 0 gets the result.

    Leaves nothing behind: a missing folder is created and removed again.

    Args:
        folder: output folder, as this rank would write it.
        size_bytes: bytes that rank 0 writes to measure the rate.
        timeout_s: seconds for which other ranks look for rank 0's file.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    missing = [path for path in (folder, *folder.parents) if not path.exists()]  # deepest first
    token = uuid4().hex
    problem, rate, shared = _write_token(folder, token), None, None
    if rank == 0 and not problem:
        problem, rate = _write_speed(folder / f"{PREFIX}{token}.part", size_bytes)
    if dist.is_initialized():
        # Every rank wrote its own token; all look for rank 0's, sent as 16 bytes and an error flag.
        first_token = torch.tensor([*bytes.fromhex(token), bool(problem)])
        dist.broadcast(first_token, src=0)
        *content, failed = first_token.tolist()
        shared = None if failed else _is_visible(folder, bytes(content).hex(), timeout_s)
    result = Folder(
        rank=rank,
        path=str(folder.absolute()),
        shared=shared,
        problem=problem,
        write_mb_per_s=rate,
    )
    parts = [msgspec.json.encode(result)]
    if dist.is_initialized():
        parts = gather_bytes(parts[0])
        dist.barrier()  # all ranks have looked
    with suppress(OSError):
        for path in folder.glob(f"{PREFIX}*"):  # also of other ranks, or the folder stays
            path.unlink(missing_ok=True)
    # Deepest first, so that each folder is empty when its turn comes.
    for path in missing:
        with suppress(OSError):
            path.rmdir()
    return [msgspec.json.decode(part, type=Folder) for part in parts]


def _write_token(folder: Path, token: str) -> str:
    """Write a file named after the token; return the error, or an empty text."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{PREFIX}{token}").write_text(token)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _write_speed(path: Path, size_bytes: int) -> tuple[str, float | None]:
    """Write and sync a file; return an error text and the rate in 10⁶ bytes per second."""
    chunk = os.urandom(min(CHUNK_BYTES, size_bytes))  # incompressible
    start, chunks = time.perf_counter(), size_bytes // len(chunk)
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(chunks):
                file.write(chunk)
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error), None
    return "", chunks * len(chunk) / (time.perf_counter() - start) / 1e6


def _is_visible(folder: Path, token: str, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(OSError):
            os.listdir(folder)  # refreshes the cache of a network file system
            if (folder / f"{PREFIX}{token}").read_text() == token:
                return True
        time.sleep(0.05)
    return False
