"""Memory that this process shares with the one that writes, and that process itself."""

import json
import mmap
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

PACKAGES = str(Path(__file__).resolve().parents[2])
PROGRAM = ["-P", "-m", "ms_parallel.files.writing_process"]
"""What the interpreter is given; `-P`, as a module of the user's may be called as one of ours."""
KILL_S = 5.0
"""Seconds that a killed process gets to end."""


class SharedMemory:
    """Memory without a name, which goes with the last process that has it."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("checkpoint")
        self._mapped: mmap.mmap | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def of_size(self, size: int) -> Tensor:
        """Return `size` bytes of it; what was allocated is kept from one call to the next.

        Raises:
            OSError: there is no more memory.
        """
        if len(self._buffer) < size:
            os.posix_fallocate(self.descriptor, 0, size)  # where there is none, say so now
            self._mapped = mmap.mmap(self.descriptor, size)
            self._buffer = torch.frombuffer(self._mapped, dtype=torch.uint8)
        return self._buffer[:size]

    def close(self) -> None:
        """Give it back."""
        self._buffer, self._mapped = torch.empty(0, dtype=torch.uint8), None
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


class WritingProcess:
    """`ms_parallel.files.writing_process`, which does one job at a time.

    Args:
        memory: what it reads.
    """

    def __init__(self, memory: SharedMemory) -> None:
        inherited = os.environ.get("PYTHONPATH")
        path = os.pathsep.join(filter(None, (PACKAGES, inherited)))
        self._process = subprocess.Popen(
            [sys.executable, *PROGRAM, str(memory.descriptor), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(memory.descriptor,),
            env={**os.environ, "PYTHONPATH": path},
        )
        self.last_sign = monotonic()
        """When the process last answered, reported progress or was given a job."""
        self._waiting = b""
        self._answered: dict[str, Any] | None = None

    def ask(self, job: Mapping[str, Any]) -> None:
        """Give it a job; what comes of it is its next answer, also if it is not there any more."""
        assert self._process.stdin is not None
        self._answered, self.last_sign = None, monotonic()
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return

    def answer(self) -> dict[str, Any] | None:
        """Return what came of the job, however often it is asked; None while the job runs."""
        if self._answered is None:
            self._answered = self._read()
        return self._answered

    def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while True:
            while b"\n" not in self._waiting:
                if not select.select([pipe], [], [], 0)[0]:
                    return None
                piece = os.read(pipe, 1 << 16)
                if not piece:
                    return {"error": f"{_ending(self._process.wait())}; run the same again"}
                self._waiting += piece
            line, _, self._waiting = self._waiting.partition(b"\n")
            message: dict[str, Any] = json.loads(line)
            self.last_sign = monotonic()
            if "written" not in message:
                return message

    def end(self) -> None:
        """Kill the process and wait until it is gone, or is stuck in the kernel."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # a dead file server holds it beyond SIGKILL
            self._process.wait(KILL_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # of what it was still to be told
                pipe.close()


def _ending(code: int) -> str:
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    return f"the process that writes checkpoints ended {how}"
