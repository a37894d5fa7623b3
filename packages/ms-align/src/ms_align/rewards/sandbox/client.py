"""Client of the zygote, the process from which sandboxed programs are forked."""

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
from ms_align.rewards.sandbox.inside.zygote import PROTECTIONS, REQUEST

_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from inside.zygote import main; "
    "del sys.path[0]; main(int(sys.argv[2]), sys.argv[3])"
)
_START_LIMIT_S = 60.0


class ZygoteClient:
    """Starts the zygote and requests processes from it; thread-safe."""

    def __init__(self, protections: Sequence[str] = PROTECTIONS) -> None:
        """Start the zygote.

        Raises:
            ConfigError: the interpreter does not start.
        """
        self._lock = threading.Lock()
        self._control, zygote_end = socket.socketpair()
        with zygote_end:
            arguments = [
                str(Path(__file__).parent),
                str(zygote_end.fileno()),
                ",".join(protections),
            ]
            self._process = subprocess.Popen(
                # Isolated and without site-packages: judged code finds only the standard library.
                [sys.executable, "-I", "-S", "-c", _START, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[zygote_end.fileno()],
                env={"PATH": "", "MALLOC_ARENA_MAX": "1"},  # one arena needs little address space
                start_new_session=True,  # a process group, which `stop` can kill
            )
        assert self._process.stderr is not None
        self._errors = self._process.stderr
        active, *self.missing = self._receive_greeting().split("\n")
        self.active = frozenset(filter(None, active.split(",")))

    def _receive_greeting(self) -> str:
        greeting = b""
        self._control.settimeout(_START_LIMIT_S)
        with suppress(OSError):
            while not greeting.endswith(b"\0"):
                data = self._control.recv(4096)
                if not data:
                    break
                greeting += data
        self._control.settimeout(None)
        if not greeting.endswith(b"\0"):
            output = self._errors.read().decode(errors="replace").strip()
            self.stop()
            last = output.splitlines()[-1] if output else "no output"
            raise ConfigError(
                f"the sandbox's interpreter {sys.executable} does not start ({last}); run it with "
                "-I -S by hand to see why"
            )
        return greeting[:-1].decode()

    def start(
        self, role: str, descriptors: Sequence[int], cpu_s: int, memory_bytes: int
    ) -> socket.socket:
        """Fork a process; closing the socket kills it, and its exit status arrives there.

        Raises:
            OSError: the zygote has died.
        """
        client_end, process_end = socket.socketpair()
        request = REQUEST.pack(role.encode(), cpu_s, memory_bytes)
        try:
            # One request at a time, so that descriptors arrive with their own request.
            with process_end, self._lock:
                socket.send_fds(self._control, [request], [process_end.fileno(), *descriptors])
        except OSError:
            client_end.close()
            raise
        return client_end

    def stop(self) -> None:
        """Kill the zygote and all processes that it has forked."""
        self.close()
        try:
            self._process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Close the connections without killing the zygote, in a forked copy of the trainer."""
        self._control.close()
        self._errors.close()

    @property
    def alive(self) -> bool:
        """True while the zygote runs."""
        return self._process.poll() is None


_clients: list[ZygoteClient] = []
_start_lock = threading.Lock()


def zygote() -> ZygoteClient:
    """Return this process's zygote; it is started on first use and restarted if it has died."""
    with _start_lock:
        if _clients and not _clients[0].alive:
            _clients.pop().stop()
        if not _clients:
            _clients.append(ZygoteClient())
        return _clients[0]


def _after_fork() -> None:
    global _start_lock
    # Another thread of the parent may have held the old lock during the fork.
    _start_lock = threading.Lock()
    while _clients:
        _clients.pop().close()  # the zygote belongs to the parent


def _at_exit() -> None:
    while _clients:
        _clients.pop().stop()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
