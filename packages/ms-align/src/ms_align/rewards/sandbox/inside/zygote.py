"""The process that judged programs are forked from: it raises the walls once, and knows no test.

It reads requests from one socket. Each brings a socket of its own and the descriptors of the new
process; programs and tests go through those and never through here, so that no process inherits
what another one was given. The process is killed as soon as its socket closes, and its exit status
is the last thing that is said there.
"""

import fcntl
import gc
import os
import platform
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress

from . import landlock, namespaces, privileges, program, seccomp
from .kernel import MissingError, libc

REQUEST = struct.Struct("=8sQQ")
"""The role, seconds of processor time, bytes of memory; descriptors travel beside it."""
STATUS = struct.Struct("=i")
"""An exit code, or a signal's number below 0."""
WALLS = ("seccomp", "landlock", "namespaces", "privileges")
"""Each stands by itself: no other one is needed for it to hold."""
MOST_DESCRIPTORS = 8
THREADS = 64
_PR_SET_PDEATHSIG = 1
_COMMON = (
    *("asyncio", "bisect", "collections", "ctypes", "dataclasses", "datetime", "decimal", "enum"),
    *("functools", "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics"),
    *("string", "threading", "typing"),
)
"""Modules that many programs import: what is imported before the fork costs them nothing."""


def main(control: int, walls: str) -> None:
    """Raise the walls, say which stand and which are missing, and serve until told to end."""
    for name in _COMMON:
        __import__(name)
    sys.path[:] = [os.path.realpath(one) for one in sys.path]
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.environ.clear()
    os.chdir("/")
    wanted = walls.split(",")
    standing, missing = _raise_walls(wanted)
    connection = socket.socket(fileno=control)
    lines = [",".join(standing), *missing]
    connection.sendall("\n".join(lines).encode() + b"\0")
    gc.collect()
    gc.freeze()
    Zygote(connection, nothing, "seccomp" in standing, "namespaces" in standing).serve()


def readable() -> list[str]:
    """List what a program may read: the interpreter's library and the system's shared libraries."""
    library = os.path.dirname(os.path.realpath(os.__file__))
    wanted = [os.path.dirname(library), *sys.path]  # beside it lies libpython
    wanted += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    wanted += ["/usr/share/zoneinfo"]
    kept: list[str] = []
    for path in sorted({one for one in wanted if os.path.exists(one)}):
        if not any(path.startswith(one + "/") and not os.path.islink(one) for one in kept):
            kept.append(path)
    return kept


def _raise_walls(wanted: list[str]) -> tuple[list[str], list[str]]:
    """Raise the walls that stand in all processes; seccomp is checked here and raised in each."""
    if sys.platform != "linux":
        return [], [f"{wall} ({sys.platform})" for wall in wanted]
    paths = readable()
    steps: dict[str, Callable[[], None]] = {
        "namespaces": lambda: namespaces.enter(paths),
        "privileges": _give_up_privileges,
        "landlock": lambda: landlock.restrict(paths),
        "seccomp": _check_seccomp,
    }
    standing, missing = [], []
    for wall, step in steps.items():
        if wall not in wanted:
            continue
        try:
            if wall == "landlock":
                privileges.forbid_new()
            step()
            standing.append(wall)
        except (MissingError, OSError) as error:
            missing.append(str(error))
    return standing, missing


def _give_up_privileges() -> None:
    privileges.drop_user()
    privileges.drop_capabilities()
    privileges.forbid_new()


def _check_seccomp() -> None:
    seccomp.filter_program(platform.machine())
    child = os.fork()
    if child == 0:
        try:
            privileges.forbid_new()
            seccomp.install()
        except BaseException:
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise MissingError("seccomp filters")


class Zygote:
    """Forks a process for each request, ends it when its socket closes, and reports its end."""

    def __init__(
        self, control: socket.socket, nothing: int, filtered: bool, in_namespaces: bool
    ) -> None:
        self._control, self._nothing = control, nothing
        self._filtered, self._in_namespaces = filtered, in_namespaces
        self._shared_threads = _tasks_of_this_user() + 64 * THREADS
        self._sockets: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve until the control socket closes; every process is then killed."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    if not self._take_request():
                        for process in self._sockets:
                            _kill(process)
                        return
                elif key.fileobj == self._woken:
                    with suppress(BlockingIOError):
                        os.read(self._woken, 4096)
                    self._reap()
                else:  # closed by who asked for the process
                    self._selector.unregister(key.fileobj)
                    _kill(key.data)

    def _take_request(self) -> bool:
        request, descriptors, _, _ = socket.recv_fds(self._control, REQUEST.size, MOST_DESCRIPTORS)
        if len(request) < REQUEST.size:
            return False
        own, *given = descriptors
        process = os.fork()
        if process == 0:
            self._become(request, given)
        for one in given:
            os.close(one)
        connection = socket.socket(fileno=own)
        self._sockets[process] = connection
        self._selector.register(connection, selectors.EVENT_READ, process)
        return True

    def _reap(self) -> None:
        while self._sockets:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            connection = self._sockets.pop(process, None)
            if connection is None:
                continue
            with suppress(KeyError):
                self._selector.unregister(connection)
            with suppress(OSError):
                connection.send(STATUS.pack(os.waitstatus_to_exitcode(status)))
            connection.close()

    def _become(self, request: bytes, given: list[int]) -> None:
        """Take the new process's descriptors and limits, do what its role is, and end it."""
        code = 1
        try:
            role, cpu_s, memory_bytes = REQUEST.unpack(request)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            _place([self._nothing, given[0], *given])  # its outputs are one pipe
            self._confine(cpu_s, memory_bytes)
            code = program.perform(role.rstrip(b"\0").decode())
            sys.stdout.flush()
        except BaseException as error:
            with suppress(BaseException):
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
        os._exit(code)

    def _confine(self, cpu_s: int, memory_bytes: int) -> None:
        own_user = self._in_namespaces and namespaces.own_user()
        if sys.platform == "linux":
            libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if own_user:
            privileges.drop_capabilities()
        threads = THREADS if own_user else self._shared_threads
        privileges.limit(cpu_s, memory_bytes, threads)
        if self._filtered:
            privileges.forbid_new()
            seccomp.install()


def _place(descriptors: list[int]) -> None:
    """Make them 0, 1, 2 and so on, and close all others."""
    above = [fcntl.fcntl(one, fcntl.F_DUPFD, 2 * MOST_DESCRIPTORS) for one in descriptors]
    for index, one in enumerate(above):
        os.dup2(one, index)
    os.closerange(len(descriptors), max(above) + 4096)


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):  # it has no group of its own yet
        os.killpg(process, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _tasks_of_this_user() -> int:
    """Count this user's threads; a limit that no namespace counts apart stands above them."""
    tasks = 0
    with suppress(OSError):
        for process in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):
                if os.stat(f"/proc/{process}").st_uid == os.getuid():
                    tasks += len(os.listdir(f"/proc/{process}/task"))
    return tasks
