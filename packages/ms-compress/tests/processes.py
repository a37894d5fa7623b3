"""Start real processes that form a process group, and collect what each of them returns."""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
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
    environment: Mapping[str, str] | None = None,
    check: bool = True,
    **arguments: Any,
) -> list[Any]:
    """Call `function(**arguments)` of `file` in `count` processes, and return each one's result.

    Arguments and results travel as JSON. The processes meet at a store that this process holds
    (as under torchrun), so that no port can be taken in between. They are forked from one that has
    imported `file`, which must start nothing when it is imported: the imports are paid once. With
    `check=False` a process that failed yields `{"failed": its output}` in place of a result.
    """
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    launched = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, __file__, str(file), function, json.dumps(arguments), name]
        with (folder / "log").open("wb") as log:
            parent = subprocess.Popen(
                command,
                env={**os.environ, **launched, **(environment or {})},
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that all can be killed together
            )
        try:
            codes = _wait(parent, count, folder, timeout_s, stop_early=check)
        finally:
            if parent.poll() is None:
                os.killpg(parent.pid, signal.SIGKILL)
            parent.wait()
        return [_result(folder, rank, code, check) for rank, code in enumerate(codes)]


def _wait(
    parent: "subprocess.Popen[bytes]",
    count: int,
    folder: Path,
    timeout_s: float,
    *,
    stop_early: bool,
) -> list[int]:
    """Exit codes of all; gives up at the first failure (if `stop_early`) or after the time."""
    deadline = monotonic() + timeout_s
    while True:
        ended = parent.poll() is not None
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


def _fork_all(file: str, function: str, arguments: str, folder: str) -> int:
    """Import `file`, fork a process a rank, and note how each ends."""
    spec = spec_from_file_location("processes_target", file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(file)
    sys.path.insert(0, str(Path(file).parent))
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    ranks = {}
    for rank in range(int(os.environ["WORLD_SIZE"])):
        child = os.fork()
        if child == 0:
            os._exit(_be(rank, module, function, arguments, Path(folder)))
        ranks[child] = rank
    while ranks:
        child, status = os.wait()
        code = Path(folder, f"{ranks.pop(child)}.code")
        aside = code.with_suffix(".aside")
        aside.write_text(str(os.waitstatus_to_exitcode(status)))
        aside.replace(code)
    return 0


def _be(rank: int, module: ModuleType, function: str, arguments: str, folder: Path) -> int:
    """Be one rank: everything that this process prints goes to its log."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
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
    sys.exit(_fork_all(*sys.argv[1:]))
