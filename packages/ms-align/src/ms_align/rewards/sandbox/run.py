"""Runs a program, or a response and its tests, and says what became of them."""

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
"""The most that a pipe still holds when its writer has died."""
_AT_ONCE_S = 0.4
"""How long a killed process may take to be gone."""


def run_python(program: str, limits: Limits | None = None) -> Outcome:
    """Run a program to its end.

    `passed` is the program's own word: one that is unread can say it without running to its end.
    `judge` has a verdict.

    Raises:
        ConfigError: this machine offers too little to confine a program, and `unconfined` is not
            set.
    """
    return _run({"program": program}, limits or Limits())


def judge(response: str, tests: str, limits: Limits | None = None) -> Outcome:
    """Run a response's program, and tests of its functions, each in a process of its own.

    The tests find the response's names, and what they call runs there. Plain values cross as JSON;
    other objects stay there and can be called, read, indexed and walked through, but not compared.

    Raises:
        ConfigError: as for `run_python`.
    """
    return _run({"response": response, "tests": tests}, limits or Limits())


def _run(texts: dict[str, str], limits: Limits) -> Outcome:
    problem: OSError | None = None
    for _ in range(2):
        client = zygote()
        try:
            lacking = _lacking(client)
            if lacking and not limits.unconfined:
                raise ConfigError(
                    f"this machine cannot confine a program: {lacking}; run on Linux 5.13 or "
                    "later on x86-64 or arm64, or set unconfined"
                )
            return run_in(client, texts, limits, confined=not lacking)
        except OSError as error:
            problem = error
        client.stop()
    raise ConfigError(
        f"the sandbox failed twice: {problem}; is this machine out of memory, processes or files?"
    ) from problem


@cache
def _lacking(client: ZygoteClient) -> str:
    """Tell what the promise needs and this machine lacks, by its word and by a probe."""
    standing = client.standing
    if "seccomp" in standing and "privileges" in standing and standing & {"landlock", "namespaces"}:
        with tempfile.NamedTemporaryFile() as outside:
            probe = _PROBE.format(outside=outside.name)
            outcome = run_in(client, {"program": probe}, Limits(wall_s=30.0, cpu_s=30))
        return "" if outcome.passed else f"a probe got out ({outcome.output.strip()[-200:]})"
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
    """Run the texts, each in the role that is its key.

    Raises:
        OSError: no process could be had.
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
    """The processes of one run, what they print, and the verdict."""

    def __init__(self, client: ZygoteClient, limits: Limits, roles: Iterable[str]) -> None:
        self._client, self._limits = client, limits
        self._selector = selectors.DefaultSelector()
        self._speaker = "tests" if "tests" in roles else "program"
        self._sockets: dict[str, socket.socket] = {}
        self._statuses: dict[str, int] = {}
        self._pipes: dict[str, int] = {}
        self._printed = dict.fromkeys(roles, 0)
        self._tails = dict.fromkeys(roles, b"")
        self._verdict = b""

    def start(self, texts: dict[str, str]) -> None:
        """Start a process for each text.

        Raises:
            OSError: no process could be had.
        """
        with ExitStack() as given:  # the ends that the processes were given are closed here
            verdict = self._pipe_from("verdict", given)
            asked, answered = _pipe(given), _pipe(given)
            wires = {
                "program": [verdict],
                "response": [asked[0], answered[1]],
                "tests": [answered[0], asked[1], verdict],
            }
            for role, text in texts.items():
                program = given.enter_context(_as_file(text))
                descriptors = [self._pipe_from(role, given), program.fileno(), *wires[role]]
                connection = self._client.start(
                    role, descriptors, self._limits.cpu_s, self._limits.memory_mib << 20
                )
                self._sockets[role] = connection
                self._selector.register(connection, selectors.EVENT_READ, role)

    def _pipe_from(self, source: str, given: ExitStack) -> int:
        """Make a pipe whose reading end is watched here, and return its writing end."""
        reading, writing = os.pipe()
        given.callback(os.close, writing)
        os.set_blocking(reading, False)
        self._pipes[source] = reading
        self._selector.register(reading, selectors.EVENT_READ, source)
        return writing

    def wait(self, deadline: float) -> str:
        """Wait for the final verdict; return `timeout` or `output` where a limit was met before."""
        while not self._is_over():
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            for key, _ in self._selector.select(left):
                if isinstance(key.fileobj, socket.socket):
                    self._note_status(key.data, key.fileobj)
                elif not self._read(key.data):
                    self._selector.unregister(key.fileobj)
            if max(self._printed.values()) > self._limits.output_kib << 10:
                return "output"
        return ""

    def _is_over(self) -> bool:
        if self._speaker not in self._statuses:
            return False
        # The tests may see that the response has ended before its status is known.
        return self._verdict != RESPONSE_GONE or "response" in self._statuses

    def _note_status(self, role: str, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        status = connection.recv(STATUS.size)
        if len(status) < STATUS.size:
            raise ConnectionResetError("the process that forks has died")
        (self._statuses[role],) = STATUS.unpack(status)

    def _read(self, source: str) -> bool:
        """Take what there is, and keep its end; False where no more comes."""
        try:
            some = os.read(self._pipes[source], 1 << 16)
        except BlockingIOError:
            return False
        if source == "verdict":
            self._verdict = (self._verdict + some)[:SHOWN_BYTES]
        else:
            self._printed[source] += len(some)
            self._tails[source] = (self._tails[source] + some)[-SHOWN_BYTES:]
        return bool(some)

    def end(self) -> None:
        """Kill what still runs, wait until it is gone, and take what it had printed."""
        for connection in self._sockets.values():
            connection.shutdown(socket.SHUT_WR)
        until = time.monotonic() + _AT_ONCE_S
        for role, connection in self._sockets.items():
            with connection:
                if role not in self._statuses and not _is_gone(connection, until):
                    self._client.stop()
        self._selector.close()
        for source, pipe in self._pipes.items():
            for _ in range(1 + (PIPE_BYTES >> 16)):
                if not self._read(source):
                    break
            os.close(pipe)

    @property
    def output(self) -> str:
        """The end of what they printed, the speaker's last."""
        return b"".join(self._tails.values())[-SHOWN_BYTES:].decode(errors="replace")

    def reason(self) -> str:
        """Tell why it ended as it did."""
        if self._verdict == PASSED and self._statuses[self._speaker] == 0:
            return "passed"
        ended = self._statuses["response" if self._verdict == RESPONSE_GONE else self._speaker]
        if ended in (-signal.SIGXCPU, -signal.SIGKILL):
            return "timeout"
        if "MemoryError" in self.output or ended in (-signal.SIGSEGV, -signal.SIGABRT):
            return "memory"
        return "failed" if ended else "ended early"


def _is_gone(connection: socket.socket, until: float) -> bool:
    """Return whether a killed process has been reaped by then."""
    connection.settimeout(max(0.001, until - time.monotonic()))
    try:
        connection.recv(STATUS.size)
    except TimeoutError:
        return False
    return True


def _pipe(given: ExitStack) -> tuple[int, int]:
    """Open a pipe that leads from one process to another, and return both its ends."""
    ends = os.pipe()
    for one in ends:
        given.callback(os.close, one)
    return ends


def _as_file(text: str) -> IO[bytes]:
    """Write a text into a file without a name, for one process to read."""
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("program"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(text.encode(errors="surrogatepass"))  # what is no text is no program either
    file.seek(0)
    return file
