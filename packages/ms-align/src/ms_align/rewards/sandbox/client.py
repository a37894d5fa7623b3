"""The trainer's end of the process that judged programs are forked from."""

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ms_align.errors import ConfigError
from ms_align.rewards.sandbox.inside.zygote import REQUEST, WALLS

_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from inside.zygote import main; "
    "del sys.path[0]; main(int(sys.argv[2]), sys.argv[3])"
)
_START_LIMIT_S = 60.0


class ZygoteClient:
    """Starts the process and asks it for others; safe to be used by several threads."""

    def __init__(self, walls: Sequence[str] = WALLS) -> None:
        """Start it.

        Raises:
            ConfigError: the interpreter does not start.
        """
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        with theirs:
            arguments = [str(Path(__file__).parent), str(theirs.fileno()), ",".join(walls)]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={"PATH": "", "MALLOC_ARENA_MAX": "1"},
                start_new_session=True,
            )
        assert self._process.stderr is not None
        self._errors = self._process.stderr
        standing, *self.missing = self._hello().split("\n")
        self.standing = frozenset(filter(None, standing.split(",")))

    def _hello(self) -> str:
        said = b""
        self._control.settimeout(_START_LIMIT_S)
        with suppress(OSError):
            while not said.endswith(b"\0"):
                more = self._control.recv(4096)
                if not more:
                    break
                said += more
        self._control.settimeout(None)
        if not said.endswith(b"\0"):
            output = self._errors.read().decode(errors="replace").strip()
            self.stop()
            last = output.splitlines()[-1] if output else "it said nothing"
            raise ConfigError(
                f"the sandbox's interpreter {sys.executable} does not start ({last}); run it with "
                "-I -S by hand to see why"
            )
        return said[:-1].decode()

    def start(
        self, role: str, descriptors: Sequence[int], cpu_s: int, memory_bytes: int
    ) -> socket.socket:
        """Fork a process; it is killed when the socket closes, which says its status at its end.

        Raises:
            OSError: the process that forks is gone.
        """
        ours, theirs = socket.socketpair()
        request = REQUEST.pack(role.encode(), cpu_s, memory_bytes)
        try:
            with theirs, self._lock:
                socket.send_fds(self._control, [request], [theirs.fileno(), *descriptors])
        except OSError:
            ours.close()
            raise
        return ours

    def stop(self) -> None:
        """End it, and every process that it has forked."""
        self.forget()
        try:
            self._process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def forget(self) -> None:
        """Close what leads to it, as a fork of the trainer does: it belongs to the trainer."""
        self._control.close()
        self._errors.close()

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None


_of_this_process: list[ZygoteClient] = []
_starting = threading.Lock()


def zygote() -> ZygoteClient:
    """Return the zygote of this process, started at the first call and again if it has died."""
    with _starting:
        if _of_this_process and not _of_this_process[0].alive:
            _of_this_process.pop().stop()
        if not _of_this_process:
            _of_this_process.append(ZygoteClient())
        return _of_this_process[0]


def _after_fork() -> None:
    global _starting
    _starting = threading.Lock()
    while _of_this_process:
        _of_this_process.pop().forget()


def _at_exit() -> None:
    while _of_this_process:
        _of_this_process.pop().stop()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
