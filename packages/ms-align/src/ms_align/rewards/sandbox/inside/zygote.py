"""The zygote: sets up the protections once, then forks sandboxed processes.

Requests arrive on one socket. Each carries a socket for the new process and its descriptors;
programs and tests are sent through these and never reach the zygote, so no process inherits another
one's data. A process is killed as soon as its socket closes, and its exit status is the last
message on that socket.
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
"""Role, CPU seconds and bytes of memory; the descriptors are sent along."""
STATUS = struct.Struct("=i")
"""Exit code, or the negative number of a signal."""
PROTECTIONS = ("seccomp", "landlock", "namespaces", "privileges")
"""Protections; each works without the others."""
MAX_DESCRIPTORS = 8
THREADS = 64
_PR_SET_PDEATHSIG = 1
_COMMON = (
    *("asyncio", "bisect", "collections", "ctypes", "dataclasses", "datetime", "decimal", "enum"),
    *("functools", "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics"),
    *("string", "threading", "typing"),
)
"""Modules that many programs import; loaded before the fork, they are free."""


def main(control: int, protections: str) -> None:
    """Set up the protections, report active and missing ones, and serve until the client ends."""
    for name in _COMMON:
        __import__(name)
    sys.path[:] = [os.path.realpath(folder) for folder in sys.path]
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.environ.clear()
    os.chdir("/")
    requested = protections.split(",")
    active, missing = _activate(requested)
    connection = socket.socket(fileno=control)
    lines = [",".join(active), *missing]
    connection.sendall("\n".join(lines).encode() + b"\0")
    # Freezing keeps the collector from touching, and so copying, shared pages after a fork.
    gc.collect()
    gc.freeze()
    Zygote(connection, null, "seccomp" in active, "namespaces" in active).serve()


def readable() -> list[str]:
    """List readable paths: the interpreter's library and the system's shared libraries."""
    library = os.path.dirname(os.path.realpath(os.__file__))
    paths = [os.path.dirname(library), *sys.path]  # libpython is in the parent folder
    paths += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    paths += ["/usr/share/zoneinfo"]
    roots: list[str] = []
    for path in sorted({path for path in paths if os.path.exists(path)}):
        if not any(path.startswith(root + "/") and not os.path.islink(root) for root in roots):
            roots.append(path)
    return roots


def _activate(requested: list[str]) -> tuple[list[str], list[str]]:
    """Activate protections; seccomp is only tested here and activated in each process."""
    if sys.platform != "linux":
        return [], [f"{protection} ({sys.platform})" for protection in requested]
    paths = readable()
    steps: dict[str, Callable[[], None]] = {
        "namespaces": lambda: namespaces.enter(paths),
        "privileges": _drop_privileges,
        "landlock": lambda: landlock.restrict(paths),
        "seccomp": _check_seccomp,
    }
    active, missing = [], []
    for protection, step in steps.items():
        if protection not in requested:
            continue
        try:
            if protection == "landlock":
                privileges.forbid_new()
            step()
            active.append(protection)
        except (MissingError, OSError) as error:
            missing.append(str(error))
    return active, missing


def _drop_privileges() -> None:
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
    """Forks a process per request, kills it when its socket closes, and reports its status."""

    def __init__(
        self, control: socket.socket, null: int, filtered: bool, in_namespaces: bool
    ) -> None:
        self._control, self._null = control, null
        self._filtered, self._in_namespaces = filtered, in_namespaces
        self._shared_threads = _tasks_of_this_user() + 64 * THREADS
        self._sockets: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # SIGCHLD wakes the selector through a pipe.
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve until the control socket closes, then kill all processes."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    if not self._take_request():
                        for process in self._sockets:
                            _kill(process)
                        return
                elif key.fileobj == self._wakeup:
                    with suppress(BlockingIOError):
                        os.read(self._wakeup, 4096)
                    self._reap()
                else:  # the client has closed the socket
                    self._selector.unregister(key.fileobj)
                    _kill(key.data)

    def _take_request(self) -> bool:
        request, descriptors, _, _ = socket.recv_fds(self._control, REQUEST.size, MAX_DESCRIPTORS)
        if len(request) < REQUEST.size:
            return False
        socket_fd, *inherited = descriptors
        process = os.fork()
        if process == 0:
            self._become(request, inherited)
        for descriptor in inherited:
            os.close(descriptor)
        connection = socket.socket(fileno=socket_fd)
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

    def _become(self, request: bytes, inherited: list[int]) -> None:
        """Set up descriptors and limits in the new process, run its role and exit."""
        code = 1
        try:
            role, cpu_s, memory_bytes = REQUEST.unpack(request)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # A new process group, so that all its descendants can be killed together.
            os.setsid()
            _assign_descriptors([self._null, inherited[0], *inherited])  # stdout and stderr share
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


def _assign_descriptors(descriptors: list[int]) -> None:
    """Renumber descriptors to 0, 1, 2 and so on, and close all others."""
    above = [
        fcntl.fcntl(descriptor, fcntl.F_DUPFD, 2 * MAX_DESCRIPTORS) for descriptor in descriptors
    ]
    for index, descriptor in enumerate(above):
        os.dup2(descriptor, index)
    os.closerange(len(descriptors), max(above) + 4096)


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):  # its process group may not exist yet
        os.killpg(process, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _tasks_of_this_user() -> int:
    """Count this user's threads, as a base for the limit where namespaces do not separate them."""
    tasks = 0
    with suppress(OSError):
        for process in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):
                if os.stat(f"/proc/{process}").st_uid == os.getuid():
                    tasks += len(os.listdir(f"/proc/{process}/task"))
    return tasks
