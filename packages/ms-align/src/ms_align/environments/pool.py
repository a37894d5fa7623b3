"""Client of the process that runs tools and environments, with limits on time and output."""

import json
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from ms_align.environments.options import ToolLimits
from ms_align.environments.worker import COMMAND, PREFIX_BYTES
from ms_align.errors import ConfigError, RewardError

_WORKER = Path(__file__).with_name("worker.py")
_POLL_S = 0.1
_START_LIMIT_S = 600
"""Time limit for importing the modules of the tools."""


@frozen(kw_only=True)
class Request:
    """A request to a child process."""

    fields: Mapping[str, Any]
    """`do`, `seed` and the arguments; `worker.Child.answer` defines them."""
    child: "ChildProcess | None" = None
    """Process of the environment; None for a tool, which runs in any idle process."""
    problem: str = ""
    """Error to reply with instead of serving a malformed call."""


@define(eq=False)
class ChildProcess:
    """A forked process with one environment, or one that runs tools."""

    pid: int
    connection: socket.socket
    unread: bytearray = field(factory=bytearray)
    deadline: float = 0.0
    alive: bool = True


class ToolPool:
    """Processes for tools and environments; at most `limits.workers` are busy at a time.

    Args:
        tools: `module:function` of each tool.
        environment: `module:Class` of the environment, if any.
        limits: limits of a call.

    Raises:
        ConfigError: a module cannot be imported.
    """

    def __init__(
        self, tools: Sequence[str], environment: str | None, limits: ToolLimits | None = None
    ) -> None:
        self.limits = limits or ToolLimits()
        self._idle: list[ChildProcess] = []
        settings = {
            "path": ["", *sys.path],
            "tools": list(tools),
            "environment": environment,
            "memory_bytes": self.limits.memory_mib << 20,
            "output_bytes": self.limits.output_kib << 10,
        }
        self._control, theirs = socket.socketpair()
        with theirs:
            # -I and -S: only the tools' modules are imported, so a fork stays small and fast.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_WORKER), json.dumps(settings)],
                stdin=theirs.fileno(),
            )
        self._control.settimeout(_START_LIMIT_S)
        greeting, problem = b"", ""
        try:
            while not greeting.endswith(b"\n") and (data := self._control.recv(4096)):
                greeting += data
        except TimeoutError:
            problem = f"their imports took longer than {_START_LIMIT_S} s"
        except OSError:
            problem = "the process ended"
        self._control.settimeout(None)
        if b"error" in greeting:
            problem = json.loads(greeting)["error"]
        if problem or not greeting:
            self.close()
            names = [*tools, *([environment] if environment else [])]
            raise ConfigError(
                f"tools must be importable as module:function, and {', '.join(names)} failed: "
                f"{problem or 'the process ended'}; define them in a module in this folder or on "
                "PYTHONPATH"
            )

    def start(self) -> ChildProcess:
        """Fork a child process.

        Raises:
            RewardError: the worker process has died.
        """
        ours, theirs = socket.socketpair()
        try:
            # The child gets its end of the connection as a file descriptor over the control socket.
            with theirs:
                socket.send_fds(self._control, [COMMAND.pack(b"+", 0)], [theirs.fileno()])
            reply = self._control.recv(COMMAND.size, socket.MSG_WAITALL)
            return ChildProcess(COMMAND.unpack(reply)[1], ours)
        except Exception as error:
            ours.close()
            raise RewardError(
                f"the process that runs tools has died ({error}); check this machine's memory and "
                "process limits, and restart the run"
            ) from error

    def end(self, child: ChildProcess) -> None:
        """Kill a process and its descendants."""
        if child.alive:
            child.alive = False
            child.connection.close()
            with suppress(OSError):
                self._control.sendall(COMMAND.pack(b"-", child.pid))

    def run(
        self,
        requests: Sequence[Request],
        on_reply: Callable[[int], None] | None = None,
        is_waiting: Callable[[int], bool] | None = None,
    ) -> list[dict[str, Any]]:
        """Serve requests in parallel; return their replies in order.

        Args:
            requests: requests to serve.
            on_reply: called with the index of each finished request.
            is_waiting: returns True while a request (by index) waits for this process, which
                restarts its time limit.

        A reply has `text` (for an environment's step also `reward` and `done`), or `error` with a
        short message. A process that exceeds a limit is killed.
        """
        replies: list[dict[str, Any]] = [{} for _ in requests]
        queue = deque(range(len(requests)))
        working: dict[ChildProcess, int] = {}
        with selectors.DefaultSelector() as selector:

            def finish(child: ChildProcess, reply: dict[str, Any], *, ended: bool = False) -> None:
                index = working.pop(child)
                selector.unregister(child.connection)
                child.unread.clear()
                replies[index] = reply
                if on_reply is not None:
                    on_reply(index)
                if ended:
                    self.end(child)
                elif requests[index].child is None:
                    self._idle.append(child)

            while queue or working:
                # Start requests until all workers are busy.
                while queue and len(working) < self.limits.workers:
                    index = queue.popleft()
                    child = requests[index].child
                    if requests[index].problem:
                        replies[index] = {"error": requests[index].problem}
                        continue
                    if child is None:
                        child = self._idle.pop() if self._idle else self.start()
                    if not child.alive:
                        replies[index] = {"error": "its process has ended"}
                        continue
                    child.deadline = time.monotonic() + self.limits.timeout_s
                    working[child] = index
                    selector.register(child.connection, selectors.EVENT_READ, child)
                    if not _send(child, requests[index].fields):
                        finish(child, {"error": "ended its process"}, ended=True)
                # Wait for a reply or the nearest deadline. `is_waiting` has no event to wait for,
                # so it is polled.
                time_s = time.monotonic()
                remaining = min((c.deadline for c in working), default=0.0) - time_s
                if is_waiting is not None:
                    remaining = min(remaining, _POLL_S)
                    for child in [child for child, index in working.items() if is_waiting(index)]:
                        child.deadline = time_s + self.limits.timeout_s
                for key, _ in selector.select(max(remaining, 0.0)):
                    child = key.data
                    reply = self._read(child)
                    if reply is not None:
                        finish(child, reply, ended=not child.alive or "ended" in reply)
                time_s = time.monotonic()
                for child in [child for child in working if child.deadline <= time_s]:
                    problem = f"took longer than {self.limits.timeout_s:g} s"
                    finish(child, {"error": problem}, ended=True)
        return replies

    def _read(self, child: ChildProcess) -> dict[str, Any] | None:
        """Read available data; return the reply once it is complete."""
        try:
            data = child.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return {"error": "ended its process", "ended": True}
        child.unread += data
        size = int.from_bytes(child.unread[:PREFIX_BYTES], "little")
        # The worker enforces the output limit, but a tool may write to the connection itself. The
        # margin is for the JSON around the output.
        limit = (self.limits.output_kib << 10) + 4096
        if len(child.unread) >= PREFIX_BYTES and size > limit:
            return {"error": f"returned more than {self.limits.output_kib} KiB", "ended": True}
        if len(child.unread) < PREFIX_BYTES + size:
            return None
        try:
            reply = json.loads(child.unread[PREFIX_BYTES:])
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            return {"error": "gave a malformed reply", "ended": True}
        return reply

    def close(self) -> None:
        """Kill all processes."""
        self._control.close()
        for child in self._idle:
            child.connection.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _send(child: ChildProcess, fields: Mapping[str, Any]) -> bool:
    """Send a request; return False if the process has exited."""
    content = json.dumps(fields, default=str).encode()  # a row may have dates
    try:
        child.connection.sendall(len(content).to_bytes(PREFIX_BYTES, "little") + content)
    except OSError:
        return False
    return True
