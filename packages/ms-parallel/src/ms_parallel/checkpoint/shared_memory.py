"""Shared memory for background checkpoints, and the process that writes it to disk."""

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
"""Arguments of the interpreter; `-P` because a user's module may shadow one of ours."""
KILL_TIMEOUT_S = 5.0
"""Seconds to wait for a killed process."""


class SharedMemory:
    """Anonymous shared memory, freed when the last process that maps it exits."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("checkpoint")
        self._mapped: mmap.mmap | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def of_size(self, size: int) -> Tensor:
        """Return the first `size` bytes; the memory is reused between calls and only grows.

        Raises:
            OSError: not enough memory.
        """
        if len(self._buffer) < size:
            # Growth keeps the descriptor, which the writing process has inherited.
            os.posix_fallocate(self.descriptor, 0, size)  # fails now rather than on first access
            self._mapped = mmap.mmap(self.descriptor, size)
            self._buffer = torch.frombuffer(self._mapped, dtype=torch.uint8)
        return self._buffer[:size]

    def close(self) -> None:
        """Free the memory."""
        self._buffer, self._mapped = torch.empty(0, dtype=torch.uint8), None
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


class WritingProcess:
    """A process that runs `ms_parallel.files.writing_process`, one job at a time.

    Args:
        memory: memory with the bytes to write.
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
        self.last_activity = monotonic()
        """Time of the last job, progress report or result."""
        self._unread = b""
        self._result: dict[str, Any] | None = None

    def submit(self, job: Mapping[str, Any]) -> None:
        """Send a job; `result` then returns its outcome, or an error if the process died."""
        assert self._process.stdin is not None
        self._result, self.last_activity = None, monotonic()
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            # The process is dead; `result` reports how it ended.
            return

    def result(self) -> dict[str, Any] | None:
        """Return the result of the job; None while it runs."""
        if self._result is None:
            self._result = self._read()
        return self._result

    def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while True:
            # Messages are JSON lines, and a read may end in the middle of one.
            while b"\n" not in self._unread:
                if not select.select([pipe], [], [], 0)[0]:
                    return None
                data = os.read(pipe, 1 << 16)
                if not data:
                    return {"error": f"{_exit_text(self._process.wait())}; rerun the same command"}
                self._unread += data
            line, _, self._unread = self._unread.partition(b"\n")
            message: dict[str, Any] = json.loads(line)
            self.last_activity = monotonic()
            # Progress reports only update the time of the last activity.
            if "written" not in message:
                return message

    def end(self) -> None:
        """Kill the process and wait until it has exited or is stuck in the kernel."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # I/O on a dead file server outlives SIGKILL
            self._process.wait(KILL_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # unsent bytes
                pipe.close()


def _exit_text(code: int) -> str:
    ending = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    return f"the process that writes checkpoints ended {ending}"
