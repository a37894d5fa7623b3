"""A process that writes what another has laid in memory that both share: `python -m` of this.

It imports no torch, so that it starts at once and is small. It takes one job a line of standard
input and answers each with a line. It ends with the process that started it, whatever ends that:
nobody else may come to write in the same folder while it still does.
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
"""Written at once; a checksum of it is made while it is in the processor's cache."""
PROGRESS_S = 1.0
"""Seconds between progress reports of a long write."""


def main(memory: int, parent: int) -> None:
    """Do jobs until there are no more.

    Args:
        memory: descriptor of the shared memory.
        parent: the process that started this one.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all of a group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        return
    os.nice(NICENESS)
    for line in sys.stdin.buffer:
        send(perform(memory, json.loads(line)))


def send(message: dict[str, Any]) -> None:
    """Send the training process one line: the result of a job, or the bytes `written` so far."""
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


def perform(memory: int, job: dict[str, Any]) -> dict[str, Any]:
    """Do one job; what the operating system refuses comes back as `error`."""
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
    """Write a file from the beginning of the memory, make it durable, and give its checksums.

    Args:
        memory: descriptor of the shared memory.
        job: the `file`, and the sizes in bytes of its `parts`, each of which has a checksum.
    """
    path = Path(job["file"])
    path.parent.mkdir(parents=True, exist_ok=True)
    checksums, at, reported = [], 0, time.monotonic()
    # Not closed here: the traceback of a failed write still holds slices of the mapping, so closing
    # it would replace the operating system's reason with a BufferError.
    view = memoryview(mmap.mmap(memory, sum(job["parts"]), prot=mmap.PROT_READ))
    with path.open("xb", buffering=0) as file:
        for size in job["parts"]:
            checksum = 0
            for start in range(at, at + size, PIECE_BYTES):
                piece = view[start : min(start + PIECE_BYTES, at + size)]
                checksum = zlib.crc32(piece, checksum)
                write_all(file, piece)
                if time.monotonic() - reported > PROGRESS_S:
                    reported = time.monotonic()
                    send({"written": start})
            checksums.append(checksum)
            at += size
        os.fsync(file.fileno())
    sync_folder(path.parent)
    return checksums


def commit(job: dict[str, Any]) -> None:
    """Give a checkpoint its name, once all of its files are durable; then let old ones go.

    Args:
        job: the folder `aside` that becomes `folder`; `manifest`, a name and a text that is written
            to it first; `last`, a file and its text; `removed`, folders that go.
    """
    aside, folder = Path(job["aside"]), Path(job["folder"])
    name, text = job["manifest"]
    write_synced(aside / name, text.encode())
    sync_folder(aside)
    publish(aside, folder)
    path, text = job["last"]
    write_file(Path(path), text.encode())
    for doomed in map(Path, job["removed"]):
        away = doomed.with_name(doomed.name + ".removed")
        publish(doomed, away)
        shutil.rmtree(away)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
