"""Tries the folder of a run: whether it can be written, how fast, and whether all ranks see it."""

import os
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import msgspec
import torch
import torch.distributed as dist

from ms_parallel.cluster.doctor.measured.exchange import gather_bytes
from ms_parallel.cluster.doctor.recording.recording import Folder

BYTES, PART_BYTES = 64 << 20, 4 << 20
BEGINNING = ".doctor-"
TOKEN_BYTES = 32
PATIENCE_S = 10.0
"""Seconds after which a file that another rank has written counts as not there; network folders
may show it late."""


def measure_folders(
    folder: Path, *, size_bytes: int = BYTES, patience_s: float = PATIENCE_S
) -> list[Folder]:
    """Measure what each rank finds at a folder; all ranks call this, and rank 0 gets the result.

    Nothing is left behind; a folder that is not there is made, and removed again.

    Args:
        folder: of the run, as this rank would write it.
        size_bytes: how much rank 0 writes to measure the disk; 0 measures nothing.
        patience_s: seconds in which the others look for what rank 0 wrote.
    """
    together = dist.is_initialized() and dist.get_world_size() > 1
    rank = dist.get_rank() if together else 0
    made = _missing(folder)
    token, problem, rate = uuid4().hex, "", None
    if rank == 0:
        problem, rate = _write(folder, token, size_bytes)
    if not together:
        _remove(folder, made)
        return [_found(0, folder, None, problem, rate)]
    theirs = _token_of_first("" if problem else token)
    shared = _sees(folder, theirs, patience_s) if theirs else None
    if rank > 0:
        problem = _try(folder)
    mine = _found(rank, folder, shared, problem, rate)
    parts = gather_bytes(msgspec.json.encode(mine))
    dist.barrier()  # all have looked
    _remove(folder, made)
    return [msgspec.json.decode(part, type=Folder) for part in parts]


def _found(
    rank: int, folder: Path, shared: bool | None, problem: str, rate: float | None
) -> Folder:
    return Folder(
        rank=rank,
        path=str(folder.absolute()),
        shared=shared,
        problem=problem,
        write_mb_per_s=rate,
    )


def _missing(folder: Path) -> list[Path]:
    """List the folder and those above it that are not there, deepest first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _write(folder: Path, token: str, size_bytes: int) -> tuple[str, float | None]:
    """Write the token, and as much as is asked for, durably; why not, and 10⁶ bytes a second."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{BEGINNING}{token}"
        path.write_text(token)
        if not size_bytes:
            return "", None
        part = os.urandom(min(PART_BYTES, size_bytes))  # which no disk can compress
        began = time.perf_counter()
        with path.with_suffix(".part").open("wb", buffering=0) as file:
            for _ in range(max(1, size_bytes // len(part))):
                file.write(part)
            os.fsync(file.fileno())
        elapsed = time.perf_counter() - began
        path.with_suffix(".part").unlink()
        return "", max(1, size_bytes // len(part)) * len(part) / elapsed / 1e6
    except OSError as error:
        return error.strerror or str(error), None


def _try(folder: Path) -> str:
    """Try to write in a folder, and return why this rank cannot; empty where it can."""
    path = folder / f"{BEGINNING}{uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1")
        path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _token_of_first(token: str) -> str:
    """Return on every rank what rank 0 gives: a token, or nothing."""
    taken = torch.frombuffer(bytearray(token.encode().ljust(TOKEN_BYTES)), dtype=torch.uint8)
    dist.broadcast(taken, src=0)
    return taken.numpy().tobytes().decode().strip()


def _sees(folder: Path, token: str, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    path = folder / f"{BEGINNING}{token}"
    while time.monotonic() < deadline:
        with suppress(OSError):
            os.listdir(folder)
            if path.read_text() == token:
                return True
        time.sleep(0.05)
    return False


def _remove(folder: Path, made: list[Path]) -> None:
    with suppress(OSError):
        for path in folder.glob(f"{BEGINNING}*"):
            path.unlink(missing_ok=True)
    for path in made:
        with suppress(OSError):
            path.rmdir()
