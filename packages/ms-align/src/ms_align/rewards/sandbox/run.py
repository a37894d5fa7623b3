"""Runs a program, or a response with its tests, and reports the outcome."""

import os
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cache
from typing import IO

from ms_align.errors import ConfigError
from ms_align.rewards.sandbox.client import ZygoteClient, zygote
from ms_align.rewards.sandbox.inside.program import PASSED, RESPONSE_GONE
from ms_align.rewards.sandbox.inside.zygote import STATUS
from ms_align.rewards.sandbox.limits import Limits, Outcome

SHOWN_BYTES = 2000
PIPE_BYTES = 1 << 20
"""Upper limit of data left in a pipe when its writer has died."""
_KILL_LIMIT_S = 0.4
"""Time limit for a killed process to be gone."""


def run_python(program: str, limits: Limits | None = None) -> Outcome:
    """Run a program to completion.

    `passed` is reported by the program itself, so untrusted code can fake it. Use `judge` for a
    reliable verdict.

    Raises:
        ConfigError: this machine cannot confine a program and `unconfined` is not set.
    """
    return _run({"program": program}, limits or Limits())


def judge(response: str, tests: str, limits: Limits | None = None) -> Outcome:
    """Run the tests of a response's functions, with response and tests in separate processes.

    The tests can use the names of the response; calls run in its process. Plain values are passed
    as JSON. Other objects are proxies that can be called, read, indexed and iterated, but not
    compared.

    Raises:
        ConfigError: see `run_python`.
    """
    return _run({"response": response, "tests": tests}, limits or Limits())


def _run(texts: dict[str, str], limits: Limits) -> Outcome:
    problem: OSError | None = None
    # Try once more with a new zygote, as the first may have been killed.
    for _ in range(2):
        client = zygote()
        try:
            problem_text = _missing_protections(client)
            if problem_text and not limits.unconfined:
                raise ConfigError(
                    f"this machine cannot confine a program: {problem_text}; run on Linux 5.13 or "
                    "later on x86-64 or arm64, or set unconfined"
                )
            return run_in(client, texts, limits, confined=not problem_text)
        except OSError as error:
            problem = error
        client.stop()
    raise ConfigError(
        f"the sandbox failed twice: {problem}; check this machine's memory, processes and files"
    ) from problem


@cache
def _missing_protections(client: ZygoteClient) -> str:
    """Describe missing protections, as reported by the zygote and tested by a probe; "" if none."""
    active = client.active
    if "seccomp" in active and "privileges" in active and active & {"landlock", "namespaces"}:
        with tempfile.NamedTemporaryFile() as outside:
            probe = _PROBE.format(outside=outside.name)
            outcome = run_in(client, {"program": probe}, Limits(wall_s=30.0, cpu_s=30))
        return "" if outcome.passed else f"a probe escaped ({outcome.output.strip()[-200:]})"
    return "it lacks " + ", ".join(client.missing)


_PROBE = """
import os, socket
acts = (socket.socket, os.fork, lambda: open("x", "w"), lambda: open({outside!r}),
        lambda: os.kill(os.getppid(), 0), lambda: os.setpriority(0, 0, 1))
for act in acts:
    try:
        act()
    except OSError:
        continue
    raise SystemExit(f"attempt {{acts.index(act)}} succeeded")
"""


def run_in(
    client: ZygoteClient, texts: dict[str, str], limits: Limits, *, confined: bool = False
) -> Outcome:
    """Run source texts by role.

    Raises:
        OSError: a process could not be started.
    """
    deadline = time.monotonic() + limits.wall_s
    run = _Run(client, limits, texts)
    try:
        run.start(texts)
        stopped = run.wait(deadline)
    finally:
        run.end()
    reason = stopped or run.reason()
    return Outcome(passed=reason == "passed", reason=reason, output=run.output, confined=confined)


class _Run:
    """Processes of one run, their output and the verdict."""

    def __init__(self, client: ZygoteClient, limits: Limits, roles: Iterable[str]) -> None:
        self._client, self._limits = client, limits
        self._selector = selectors.DefaultSelector()
        self._judge = "tests" if "tests" in roles else "program"
        self._sockets: dict[str, socket.socket] = {}
        self._statuses: dict[str, int] = {}
        self._pipes: dict[str, int] = {}
        self._printed = dict.fromkeys(roles, 0)
        self._tails = dict.fromkeys(roles, b"")
        self._verdict = b""

    def start(self, texts: dict[str, str]) -> None:
        """Start a process for each role.

        Raises:
            OSError: a process could not be started.
        """
        with ExitStack() as inherited:  # closes our copies of the ends that the processes inherit
            verdict = self._pipe_from("verdict", inherited)
            requests, replies = _pipe(inherited), _pipe(inherited)  # (read end, write end)
            wires = {
                "program": [verdict],
                "response": [requests[0], replies[1]],
                "tests": [replies[0], requests[1], verdict],
            }
            for role, text in texts.items():
                program = inherited.enter_context(_as_file(text))
                descriptors = [self._pipe_from(role, inherited), program.fileno(), *wires[role]]
                connection = self._client.start(
                    role, descriptors, self._limits.cpu_s, self._limits.memory_mib << 20
                )
                self._sockets[role] = connection
                self._selector.register(connection, selectors.EVENT_READ, role)

    def _pipe_from(self, source: str, inherited: ExitStack) -> int:
        """Create a pipe whose read end is polled here, and return its write end."""
        reading, writing = os.pipe()
        inherited.callback(os.close, writing)
        os.set_blocking(reading, False)
        self._pipes[source] = reading
        self._selector.register(reading, selectors.EVENT_READ, source)
        return writing

    def wait(self, deadline: float) -> str:
        """Wait for the verdict; return `timeout` or `output` if a limit is exceeded first."""
        while not self._is_over():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return "timeout"
            for key, _ in self._selector.select(remaining):
                if isinstance(key.fileobj, socket.socket):
                    self._note_status(key.data, key.fileobj)
                elif not self._read(key.data):
                    self._selector.unregister(key.fileobj)
            # Checked after each read, so the overrun is at most one chunk.
            if max(self._printed.values()) > self._limits.output_kib << 10:
                return "output"
        return ""

    def _is_over(self) -> bool:
        if self._judge not in self._statuses:
            return False
        # The tests may notice the end of the response before its status arrives.
        return self._verdict != RESPONSE_GONE or "response" in self._statuses

    def _note_status(self, role: str, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        status = connection.recv(STATUS.size)
        if len(status) < STATUS.size:
            raise ConnectionResetError("the zygote has died")
        (self._statuses[role],) = STATUS.unpack(status)

    def _read(self, source: str) -> bool:
        """Read available data and keep its tail; return False at the end or without data."""
        try:
            data = os.read(self._pipes[source], 1 << 16)
        except BlockingIOError:
            return False
        if source == "verdict":
            self._verdict = (self._verdict + data)[:SHOWN_BYTES]
        else:
            self._printed[source] += len(data)
            self._tails[source] = (self._tails[source] + data)[-SHOWN_BYTES:]
        return bool(data)

    def end(self) -> None:
        """Kill remaining processes, wait until they are gone, and read their last output."""
        for connection in self._sockets.values():
            # The zygote kills a process when its socket closes.
            connection.shutdown(socket.SHUT_WR)
        until = time.monotonic() + _KILL_LIMIT_S
        for role, connection in self._sockets.items():
            with connection:
                if role not in self._statuses and not _is_reaped(connection, until):
                    self._client.stop()
        self._selector.close()
        for source, pipe in self._pipes.items():
            for _ in range(1 + (PIPE_BYTES >> 16)):
                if not self._read(source):
                    break
            os.close(pipe)

    @property
    def output(self) -> str:
        """End of the combined output; the output of the tests comes last."""
        return b"".join(self._tails.values())[-SHOWN_BYTES:].decode(errors="replace")

    def reason(self) -> str:
        """Return the reason for the end of the run."""
        if self._verdict == PASSED and self._statuses[self._judge] == 0:
            return "passed"
        status = self._statuses["response" if self._verdict == RESPONSE_GONE else self._judge]
        # The CPU limit sends SIGXCPU, then SIGKILL.
        if status in (-signal.SIGXCPU, -signal.SIGKILL):
            return "timeout"
        if "MemoryError" in self.output or status in (-signal.SIGSEGV, -signal.SIGABRT):
            return "memory"
        return "failed" if status else "ended early"


def _is_reaped(connection: socket.socket, until: float) -> bool:
    """Return True if a killed process is reaped before `until`."""
    connection.settimeout(max(0.001, until - time.monotonic()))
    try:
        connection.recv(STATUS.size)
    except TimeoutError:
        return False
    return True


def _pipe(inherited: ExitStack) -> tuple[int, int]:
    """Create a pipe between two processes and return both ends."""
    ends = os.pipe()
    for end in ends:
        inherited.callback(os.close, end)
    return ends


def _as_file(text: str) -> IO[bytes]:
    """Write a text to an anonymous file for one process to read."""
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("program"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(text.encode(errors="surrogatepass"))  # invalid text then fails as a SyntaxError
    file.seek(0)
    return file
