"""Real processes for tests: groups of ranks that return results, and commands.

A fork server (`nursery.py`) imports torch and the files of test functions once for all tests. For
each call it forks a parent, which forks one process per rank or the process of the command, so
only the state of imported modules is shared. If the command is torchrun, its agent forks the
ranks.
"""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist

NURSERY = Path(__file__).with_name("nursery.py")
REQUEST_LOCK = threading.Lock()
"""Serializes requests to the fork server."""


class ProcessesFailedError(AssertionError):
    """A process failed, or the group timed out."""


GLOO_FAULTS = {
    "malloc(): unaligned tcache chunk detected": "a use-after-free in a thread of gloo",
    "Gloo connectFullMesh failed": "a connection that gloo lost while the group was formed",
}
"""Rare faults of torch's gloo (about one in thousands of runs), by message.

They also occur in processes that run only torch's own C++ code and are unrelated to the code under
test, so such a run is repeated once. A process that really crashed fails the second time, too.
"""


def run_processes(count: int, file: str | Path, function: str, **options: Any) -> list[Any]:
    """Call `run_once`; after a fault of gloo, warn and repeat it once."""
    try:
        return run_once(count, file, function, **options)
    except ProcessesFailedError as error:
        faults = [fault for message, fault in GLOO_FAULTS.items() if message in str(error)]
        if not faults:
            raise
        warnings.warn(f"repeating {function}: {faults[0]}", stacklevel=2)
        return run_once(count, file, function, **options)


def run_once(
    count: int,
    file: str | Path,
    function: str,
    *,
    timeout_s: float = 300.0,
    check: bool = True,
    **arguments: Any,
) -> list[Any]:
    """Call `function(**arguments)` of `file` in `count` processes and return their results by rank.

    Arguments and results are passed as JSON. The rendezvous store runs in this process (as under
    torchrun), which rules out a race for the port. Importing `file` must have no side effects. With
    `check=False` the result of a failed process is `{"failed": output, "code": exit code}`.
    """
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    environment = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = {
            "file": str(file),
            "function": function,
            "arguments": json.dumps(arguments),
            "folder": name,
            "environment": environment,
        }
        parent = _ask_nursery(job)
        try:
            codes = _wait(parent, count, folder, timeout_s, stop_early=check)
        finally:
            _end(parent)
        return [_result(folder, rank, code, check) for rank, code in enumerate(codes)]


class Command:
    """A running `python WORDS` in a forked process, where torch is already imported.

    The interface is that of `subprocess.Popen`. For torchrun, torch's agent forks the ranks and
    makes them receive SIGINT when it dies. Tests that ranks end with their agent therefore cannot
    use this class.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: str | Path = ".",
        log: Path | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        """Start the command in `folder`.

        `imports` are modules that the fork server imports once for all commands. `log` receives
        the output; without it, `communicate` returns the output.
        """
        status_folder = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, status_folder, ignore_errors=True)
        self._out, self._err = (log, log) if log else (status_folder / "out", status_folder / "err")
        self._code = status_folder / "0.code"
        self._out.write_bytes(b"")
        job = {
            "words": list(words),
            "environment": dict(os.environ if environment is None else environment),
            "folder": str(status_folder),
            "at": str(Path(folder).absolute()),
            "out": str(self._out),
            "err": str(self._err),
            "imports": list(imports),
        }
        self._parent = _ask_nursery(job)
        while not (status_folder / "0.pid").exists():
            assert _lives(self._parent), _text(status_folder / "log")
            sleep(0.001)
        self.pid = int(_text(status_folder / "0.pid"))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while the command runs."""
        is_alive = _lives(self._parent)  # check first: the code is written before the parent ends
        if self.returncode is None and (code := _text(self._code)):
            self.returncode = int(code)
        assert is_alive or self.returncode is not None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the command to end and return its exit code."""
        deadline = monotonic() + (timeout or float("inf"))
        while (code := self.poll()) is None:
            if monotonic() > deadline:
                raise subprocess.TimeoutExpired("a command", timeout or 0.0)
            sleep(0.005)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the command to end; return its standard output and error.

        The command and its ranks are killed afterwards, also on a timeout.
        """
        try:
            self.wait(timeout)
        finally:
            self.end()
        return _text(self._out), _text(self._err)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the command has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Kill the command and its ranks."""
        _end(self._parent)


def run_command(
    words: Sequence[str], *, timeout_s: float = 240.0, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run a `Command` and return its exit code and output."""
    command = Command(words, **options)
    stdout, stderr = command.communicate(timeout_s)
    return subprocess.CompletedProcess(list(words), command.wait(), stdout, stderr)


def _ask_nursery(job: dict[str, Any]) -> int:
    """Send a job to the fork server and return the pid of the job's parent process."""
    with REQUEST_LOCK:
        nursery = _nursery()
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(json.dumps(job).encode() + b"\n")
        nursery.stdin.flush()
        answer = nursery.stdout.readline()
    if not answer:
        _nursery.cache_clear()
        raise ProcessesFailedError(
            "the fork server cannot import a file or module; see its traceback above"
        )
    return int(answer)


def _end(parent: int) -> None:
    """Kill a parent and its process group, and wait until the parent is gone."""
    with suppress(ProcessLookupError):
        os.killpg(parent, signal.SIGKILL)
    while _lives(parent):
        sleep(0.005)


@cache
def _nursery() -> "subprocess.Popen[bytes]":
    """Start the fork server, which exits when its standard input is closed."""
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
    }
    nursery = subprocess.Popen(
        [sys.executable, str(NURSERY)],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )

    @atexit.register
    def end() -> None:
        assert nursery.stdin is not None
        nursery.stdin.close()
        nursery.wait()

    return nursery


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _wait(
    parent: int, count: int, folder: Path, timeout_s: float, *, stop_early: bool
) -> list[int]:
    """Return the exit codes by rank; stop at the first failure (if `stop_early`) or timeout."""
    deadline = monotonic() + timeout_s
    while True:
        is_over = not _lives(parent)
        codes = {
            rank: int(_text(folder / f"{rank}.code") or 0)
            for rank in range(count)
            if _text(folder / f"{rank}.code")
        }
        failed = [rank for rank, code in codes.items() if code]
        if len(codes) == count and not (failed and stop_early):
            return [codes[rank] for rank in range(count)]
        if is_over or (failed and stop_early) or monotonic() > deadline:
            sleep(1.0)  # let the other ranks write their errors
            reason = f"ranks {failed} failed" if failed else f"not done after {timeout_s:.0f} s"
            logs = [
                f"--- rank {rank}\n{_text(folder / f'{rank}.log')[-3000:]}" for rank in range(count)
            ]
            raise ProcessesFailedError("\n".join([reason, _text(folder / "log")[-3000:], *logs]))
        sleep(0.02)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _result(folder: Path, rank: int, code: int, check: bool) -> Any:
    if code == 0:
        return json.loads((folder / f"{rank}.json").read_text())
    log = _text(folder / f"{rank}.log")
    if check:
        raise ProcessesFailedError(f"rank {rank} exited with {code}\n{log[-4000:]}")
    return {"failed": log or str(code), "code": code}
