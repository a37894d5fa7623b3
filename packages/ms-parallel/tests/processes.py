# A copy of shared_source/tests/processes.py, made by `nox -s copies`; change it there.
"""Start real processes that form a process group, and collect what each of them returns.

One process, the nursery, imports torch and the files of functions once for all tests. Each call has
it fork a parent, which forks a process a rank: nothing is shared but what importing has made.
"""

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from time import monotonic, sleep
from types import ModuleType
from typing import Any

import torch.distributed as dist

__all__ = ["ProcessesFailedError", "run_processes"]


class ProcessesFailedError(AssertionError):
    """At least one process failed, or all together took too long."""


def run_processes(
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
        nursery = _nursery()
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(json.dumps(job).encode() + b"\n")
        nursery.stdin.flush()
        told = nursery.stdout.readline()
        if not told:
            _nursery.cache_clear()
            raise ProcessesFailedError(f"{file} cannot be imported; the reason stands above")
        parent = int(told)
        try:
            codes = _wait(parent, count, folder, timeout_s, stop_early=check)
        finally:
            if _lives(parent):
                os.killpg(parent, signal.SIGKILL)
            while _lives(parent):
                sleep(0.005)
        return [_result(folder, rank, code, check) for rank, code in enumerate(codes)]


@cache
def _nursery() -> "subprocess.Popen[bytes]":
    """The process that forks all others; it ends when its standard input does."""
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
    }
    started = subprocess.Popen(
        [sys.executable, __file__],
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
    """Exit codes of all; gives up at the first failure (if `stop_early`) or after the time."""
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


def _serve() -> None:
    """Be the nursery: fork a parent for each line of standard input, and tell its number."""
    signal.signal(signal.SIGCHLD, _reap)
    importlib.import_module("torch._dynamo")  # which FSDP imports when it is first asked
    modules: dict[str, ModuleType] = {}
    for line in sys.stdin:
        job = json.loads(line)
        folder = Path(job["folder"])
        if job["file"] not in modules:
            modules[job["file"]] = _imported(job["file"])
        module = modules[job["file"]]
        parent = os.fork()
        if parent == 0:
            os.setpgid(0, 0)  # so that all can be killed together
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.environ.update(job["environment"])
            _redirect(folder / "log")
            _fork_all(module, job["function"], job["arguments"], folder)
            os._exit(0)
        os.setpgid(parent, parent)
        os.write(1, f"{parent}\n".encode())


def _reap(*_: object) -> None:
    """Let parents that have ended go, so that they are seen to be gone."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _imported(file: str) -> ModuleType:
    spec = spec_from_file_location(f"processes_target_{Path(file).stem}", file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(file)
    if str(Path(file).parent) not in sys.path:
        sys.path.insert(0, str(Path(file).parent))
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _redirect(path: Path) -> None:
    """Whatever this process prints goes to a file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _fork_all(module: ModuleType, function: str, arguments: str, folder: Path) -> None:
    """Fork a process a rank, and note how each ends."""
    ranks = {}
    for rank in range(int(os.environ["WORLD_SIZE"])):
        child = os.fork()
        if child == 0:
            os._exit(_be(rank, module, function, arguments, folder))
        ranks[child] = rank
    while ranks:
        child, status = os.wait()
        code = folder / f"{ranks.pop(child)}.code"
        aside = code.with_suffix(".aside")
        aside.write_text(str(os.waitstatus_to_exitcode(status)))
        aside.replace(code)


def _be(rank: int, module: ModuleType, function: str, arguments: str, folder: Path) -> int:
    """Be one rank: everything that this process prints goes to its log."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    _redirect(folder / f"{rank}.log")
    try:
        result = getattr(module, function)(**json.loads(arguments))
        (folder / f"{rank}.json").write_text(json.dumps(result))
        code = 0
    except Exception:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _serve()
