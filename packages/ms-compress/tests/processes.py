"""Start real processes: those that form a group and return results, and commands.

One process, the nursery (`nursery.py`), imports torch and the files of functions once for all
tests. Each call has it fork a parent, which forks a process a rank, or the one of a command:
nothing is shared but what importing has made. If the command is torchrun, its agent forks the
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
ASKING = threading.Lock()
"""Held while a job is sent to the nursery and its answer is read."""


class ProcessesFailedError(AssertionError):
    """At least one process failed, or all together took too long."""


HEAP_CORRUPTION = "malloc(): unaligned tcache chunk detected"
"""glibc's abort when torch's gloo thread has written to memory after freeing it.

It is rare (about one run of thousands), occurs in processes that run only torch's own C++ code, and
has nothing to do with what a test checks, so a run that ends this way is repeated once.
"""


def run_processes(count: int, file: str | Path, function: str, **options: Any) -> list[Any]:
    """Like `run_once`, repeated once, with a warning, if gloo corrupts the heap."""
    try:
        return run_once(count, file, function, **options)
    except ProcessesFailedError as error:
        if HEAP_CORRUPTION not in str(error):
            raise
        warnings.warn(f"repeating {function}: {HEAP_CORRUPTION}", stacklevel=2)
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
    """Call `function(**arguments)` of `file` in `count` processes, and return each one's result.

    Arguments and results travel as JSON. The processes meet at a store that this process holds
    (as under torchrun), so that no port can be taken in between. `file` must start nothing when it
    is imported. With `check=False` a process that failed yields `{"failed": its output}` in place
    of a result.
    """
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    launched = {
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
            "environment": launched,
        }
        parent = _ask_nursery(job)
        try:
            codes = _wait(parent, count, folder, timeout_s, stop_early=check)
        finally:
            _end(parent)
        return [_result(folder, rank, code, check) for rank, code in enumerate(codes)]


class Command:
    """What `python WORDS` does, in a process of its own that need not import torch again.

    It is asked as a `subprocess.Popen` is. Where the words start torchrun, the agent is torch's
    and forks its ranks; they get SIGINT when it dies, by torch's will, and so no proof that ranks
    end with their agent can rest on this.
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
        """Start the command in `folder`; `imports` are modules to import once for all commands.

        With `log` that file gets what it prints; without, `communicate` returns it.
        """
        notes = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, notes, ignore_errors=True)
        self._out, self._err = (log, log) if log else (notes / "out", notes / "err")
        self._code = notes / "0.code"
        self._out.write_bytes(b"")
        job = {
            "words": list(words),
            "environment": dict(os.environ if environment is None else environment),
            "folder": str(notes),
            "at": str(Path(folder).absolute()),
            "out": str(self._out),
            "err": str(self._err),
            "imports": list(imports),
        }
        self._parent = _ask_nursery(job)
        while not (notes / "0.pid").exists():
            assert _lives(self._parent), _text(notes / "log")
            sleep(0.001)
        self.pid = int(_text(notes / "0.pid"))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        lives = _lives(self._parent)  # asked first: the code is written before the parent ends
        if self.returncode is None and (code := _text(self._code)):
            self.returncode = int(code)
        assert lives or self.returncode is not None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended, and return the exit code."""
        deadline = monotonic() + (timeout or float("inf"))
        while (code := self.poll()) is None:
            if monotonic() > deadline:
                raise subprocess.TimeoutExpired("a command", timeout or 0.0)
            sleep(0.005)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return standard output and error once it has ended; all are killed if it is late.

        Nothing but the command holds what it prints.
        """
        try:
            self.wait(timeout)
        finally:
            self.end()
        return _text(self._out), _text(self._err)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Kill whatever is left of it and of its ranks."""
        _end(self._parent)


def run_command(
    words: Sequence[str], *, timeout_s: float = 240.0, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run a `Command` to its end."""
    started = Command(words, **options)
    out, err = started.communicate(timeout_s)
    return subprocess.CompletedProcess(list(words), started.wait(), out, err)


def _ask_nursery(job: dict[str, Any]) -> int:
    """Have a job done, and return the number of the process that is the parent of all of it."""
    with ASKING:
        nursery = _nursery()
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(json.dumps(job).encode() + b"\n")
        nursery.stdin.flush()
        answer = nursery.stdout.readline()
    if not answer:
        _nursery.cache_clear()
        raise ProcessesFailedError("something cannot be imported; the reason stands above")
    return int(answer)


def _end(parent: int) -> None:
    """Kill a parent and all its children, and wait until it is gone."""
    with suppress(ProcessLookupError):
        os.killpg(parent, signal.SIGKILL)
    while _lives(parent):
        sleep(0.005)


@cache
def _nursery() -> "subprocess.Popen[bytes]":
    """Start the process that forks all others; it ends when its standard input does."""
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
    }
    started = subprocess.Popen(
        [sys.executable, str(NURSERY)],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )

    @atexit.register
    def end() -> None:
        assert started.stdin is not None
        started.stdin.close()
        started.wait()

    return started


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _wait(
    parent: int, count: int, folder: Path, timeout_s: float, *, stop_early: bool
) -> list[int]:
    """Return all exit codes; give up at the first failure (if `stop_early`) or after the time."""
    deadline = monotonic() + timeout_s
    while True:
        ended = not _lives(parent)
        codes = {
            rank: int(_text(folder / f"{rank}.code") or 0)
            for rank in range(count)
            if _text(folder / f"{rank}.code")
        }
        failed = [rank for rank, code in codes.items() if code]
        if len(codes) == count and not (failed and stop_early):
            return [codes[rank] for rank in range(count)]
        if ended or (failed and stop_early) or monotonic() > deadline:
            sleep(1.0)  # let the others write why they failed
            why = f"ranks {failed} failed" if failed else f"not done after {timeout_s:.0f} s"
            logs = [
                f"--- rank {rank}\n{_text(folder / f'{rank}.log')[-3000:]}" for rank in range(count)
            ]
            raise ProcessesFailedError("\n".join([why, _text(folder / "log")[-3000:], *logs]))
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
