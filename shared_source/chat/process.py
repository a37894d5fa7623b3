"""Client of the chat-template renderer, a subprocess that is started on first use.

All templates of this process share one renderer. It exits when this process does, even on SIGKILL,
because its input pipe is closed.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

_WORKER = Path(__file__).with_name("worker.py")
_PREFIX_BYTES = 8
_TIMED_OUT = "exceeds the CPU time limit for a template"


class _TemplateProcess:
    """The renderer subprocess and a lock that serializes requests to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes, needs: str, error: type[Exception]) -> dict[str, Any]:
        """Return the answer to a request; on failure, a dictionary with the reason as `limit`."""
        with self._lock:
            process = self._process = self._process or _start(needs, error)
            try:
                answer = _exchange(process, request)
                if "limit" in answer:  # little memory may be left for the next request
                    self.close()
                return answer
            except EOFError:
                self._process = None
                return {"limit": _reason(process)}
            except BaseException:  # Ctrl-C: the next request would read this one's answer
                self.close()
                raise

    def close(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            _reason(process)

    def forget(self) -> None:
        """Drop the process after a fork, since it belongs to the parent."""
        self.__init__()  # type: ignore[misc]


def ask(request: Mapping[str, Any], *, needs: str, error: type[Exception]) -> dict[str, Any]:
    """Send a request to the renderer and return its answer; `worker` defines both.

    Args:
        request: JSON-serializable request.
        needs: package and extra that install jinja2, such as `ms-data[chat]`, for the message.
        error: exception class to raise.

    Raises:
        error: jinja2 is not installed, or the renderer cannot be started.
        TypeError: the request is not JSON-serializable.
    """
    return _PROCESS.ask(json.dumps(request).encode(), needs, error)


def _start(needs: str, error: type[Exception]) -> subprocess.Popen[bytes]:
    if importlib.util.find_spec("jinja2") is None:
        raise error(f"chat templates need jinja2; install it with `pip install '{needs}'`")
    # -I and -S: no code from the environment or current folder runs before the limits are set.
    command = [sys.executable, "-I", "-S", str(_WORKER), json.dumps(sys.path)]
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError as failure:
        raise error(f"cannot start {command[0]} to render chat templates: {failure}") from failure


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # reading the answer then raises EOFError
        process.stdin.write(len(request).to_bytes(_PREFIX_BYTES, "little") + request)
        process.stdin.flush()
    size = int.from_bytes(_read(process.stdout, _PREFIX_BYTES), "little")
    answer: dict[str, Any] = json.loads(_read(process.stdout, size))
    return answer


def _read(file: IO[bytes], size: int) -> bytes:
    content = file.read(size)
    if len(content) < size:
        raise EOFError
    return content


def _reason(process: subprocess.Popen[bytes]) -> str:
    """Close the pipes of an ended process and return the reason it ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    status = process.wait()
    if status == -signal.SIGPROF:
        return _TIMED_OUT
    return f"crashed the renderer process (status {status})"


_PROCESS = _TemplateProcess()
atexit.register(_PROCESS.close)
os.register_at_fork(after_in_child=_PROCESS.forget)
