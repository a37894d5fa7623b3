"""Tests the output folder: whether it can be written, how fast, and whether all ranks share it."""

import os
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import msgspec
import torch
import torch.distributed as dist

from ms_profile.doctor.clocks import gather_bytes
from ms_profile.doctor.recording import Folder

BYTES, PART_BYTES = 64 << 20, 4 << 20
PREFIX = ".doctor-"
TOKEN_BYTES = 32
VISIBLE_S = 10.0
"""Seconds to wait for a file written by another rank; network folders may show it late."""


def measure_folders(
    folder: Path, *, size_bytes: int = BYTES, timeout_s: float = VISIBLE_S
) -> list[Folder]:
    """Test the output folder on each rank. Collective; rank 0 gets the result.

    Leaves nothing behind: a missing folder is created and removed again.

    Args:
        folder: output folder, as this rank would write it.
        size_bytes: bytes that rank 0 writes to measure the rate; 0 to skip.
        timeout_s: seconds for which other ranks look for rank 0's file.
    """
    distributed = dist.is_initialized() and dist.get_world_size() > 1
    rank = dist.get_rank() if distributed else 0
    created = _missing_folders(folder)
    token, problem, rate = uuid4().hex, "", None
    if rank == 0:
        problem, rate = _write(folder, token, size_bytes)
    if not distributed:
        _remove(folder, created)
        return [_result(0, folder, None, problem, rate)]
    rank0_token = _broadcast_token("" if problem else token)
    shared = _wait_for_token(folder, rank0_token, timeout_s) if rank0_token else None
    if rank > 0:
        problem = _try_write(folder)
    local = _result(rank, folder, shared, problem, rate)
    parts = gather_bytes(msgspec.json.encode(local))
    dist.barrier()  # all have looked
    _remove(folder, created)
    return [msgspec.json.decode(part, type=Folder) for part in parts]


def _result(
    rank: int, folder: Path, shared: bool | None, problem: str, rate: float | None
) -> Folder:
    return Folder(
        rank=rank,
        path=str(folder.absolute()),
        shared=shared,
        problem=problem,
        write_mb_per_s=rate,
    )


def _missing_folders(folder: Path) -> list[Path]:
    """List the folder and its parents that do not exist, deepest first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _write(folder: Path, token: str, size_bytes: int) -> tuple[str, float | None]:
    """Write and sync the token and `size_bytes`; return an error text and the rate in MB/s."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{PREFIX}{token}"
        path.write_text(token)
        if not size_bytes:
            return "", None
        part = os.urandom(min(PART_BYTES, size_bytes))  # incompressible
        started = time.perf_counter()
        with path.with_suffix(".part").open("wb", buffering=0) as file:
            for _ in range(max(1, size_bytes // len(part))):
                file.write(part)
            os.fsync(file.fileno())
        elapsed = time.perf_counter() - started
        path.with_suffix(".part").unlink()
        return "", max(1, size_bytes // len(part)) * len(part) / elapsed / 1e6
    except OSError as error:
        return error.strerror or str(error), None


def _try_write(folder: Path) -> str:
    """Try to write to the folder; return the error, or an empty text."""
    path = folder / f"{PREFIX}{uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1")
        path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _broadcast_token(token: str) -> str:
    """Broadcast rank 0's token, which may be empty."""
    buffer = torch.frombuffer(bytearray(token.encode().ljust(TOKEN_BYTES)), dtype=torch.uint8)
    dist.broadcast(buffer, src=0)
    return buffer.numpy().tobytes().decode().strip()


def _wait_for_token(folder: Path, token: str, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    path = folder / f"{PREFIX}{token}"
    while time.monotonic() < deadline:
        with suppress(OSError):
            os.listdir(folder)
            if path.read_text() == token:
                return True
        time.sleep(0.05)
    return False


def _remove(folder: Path, created: list[Path]) -> None:
    with suppress(OSError):
        for path in folder.glob(f"{PREFIX}*"):
            path.unlink(missing_ok=True)
    for path in created:
        with suppress(OSError):
            path.rmdir()
