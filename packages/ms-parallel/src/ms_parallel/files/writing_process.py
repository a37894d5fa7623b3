"""Writes shared memory to checkpoint files; run in a subprocess with `python -m`.

It does not import torch, so it starts quickly and stays small. It reads one job per line from
standard input and writes one line per result. It dies with its parent, however that ends, so that
it never writes to a folder that another run has locked by then.
"""

import ctypes
import json
import mmap
import os
import shutil
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from ms_parallel.errors import WriteError
from ms_parallel.files.durable import (
    publish,
    sync_folder,
    write_all,
    write_file,
    write_synced,
    writing,
)

PR_SET_PDEATHSIG = 1
NICENESS = 10
PIECE_BYTES = 1 << 22
"""Bytes per write, small enough that the checksum is computed from the CPU cache."""
PROGRESS_S = 1.0
"""Seconds between progress reports of a long write."""


def main(memory: int, parent: int) -> None:
    """Run jobs until standard input is closed.

    Args:
        memory: descriptor of the shared memory.
        parent: pid of the parent process.
    """
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # sent to the process group; the parent handles them
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        return
    os.nice(NICENESS)
    for line in sys.stdin.buffer:
        send(perform(memory, json.loads(line)))


def send(message: dict[str, Any]) -> None:
    """Send one line to the training process: the result of a job, or the bytes `written` so far."""
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


def perform(memory: int, job: dict[str, Any]) -> dict[str, Any]:
    """Run one job; an error of the operating system is returned as `error`."""
    folder = Path(job["folder"])
    try:
        with writing(folder):
            if job["kind"] == "write":
                return {"checksums": write(memory, job)}
            commit(job)
            return {"committed": True}
    except WriteError as error:
        return {"error": str(error)}


def write(memory: int, job: dict[str, Any]) -> list[int]:
    """Write a file from the start of the shared memory, sync it, and return its checksums.

    Args:
        memory: descriptor of the shared memory.
        job: `file`, and the sizes in bytes of its `parts`, each with its own checksum.
    """
    path = Path(job["file"])
    path.parent.mkdir(parents=True, exist_ok=True)
    checksums, offset, reported = [], 0, time.monotonic()
    # Not closed here: the traceback of a failed write still holds slices of the mapping, so closing
    # it would replace the OSError with a BufferError.
    view = memoryview(mmap.mmap(memory, sum(job["parts"]), prot=mmap.PROT_READ))
    with path.open("xb", buffering=0) as file:
        for size in job["parts"]:
            checksum = 0
            for start in range(offset, offset + size, PIECE_BYTES):
                piece = view[start : min(start + PIECE_BYTES, offset + size)]
                checksum = zlib.crc32(piece, checksum)
                write_all(file, piece)
                if time.monotonic() - reported > PROGRESS_S:
                    reported = time.monotonic()
                    send({"written": start})
            checksums.append(checksum)
            offset += size
        os.fsync(file.fileno())
    sync_folder(path.parent)
    return checksums


def commit(job: dict[str, Any]) -> None:
    """Rename a checkpoint to its final name once all its files are synced; delete old ones.

    Args:
        job: `aside`, the folder to rename to `folder`; `manifest`, name and content of a file to
            write to it first; `last`, path and content of another file; `removed`, folders to
            delete.
    """
    temporary, folder = Path(job["aside"]), Path(job["folder"])
    name, text = job["manifest"]
    write_synced(temporary / name, text.encode())
    sync_folder(temporary)
    publish(temporary, folder)
    path, text = job["last"]
    write_file(Path(path), text.encode())
    for old in map(Path, job["removed"]):
        renamed = old.with_name(old.name + ".removed")
        publish(old, renamed)
        shutil.rmtree(renamed)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
