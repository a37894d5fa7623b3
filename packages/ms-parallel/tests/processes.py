"""Start real processes that form a process group, and collect what each of them returns."""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from time import monotonic, sleep
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
    timeout_s: float = 240.0,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
    **arguments: Any,
) -> list[Any]:
    """Call `function(**arguments)` of `file` in `count` processes, and return each one's result.

    Arguments and results travel as JSON. The processes meet at a store that this process holds
    (as under torchrun), so that no port can be taken in between. With `check=False` a process that
    failed yields `{"failed": its traceback}` (or its exit code) in place of a result.
    """
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    with tempfile.TemporaryDirectory() as folder:
        started = [
            _start(rank, count, store.port, file, function, arguments, folder, environment or {})
            for rank in range(count)
        ]
        try:
            codes = _wait(started, timeout_s, Path(folder), stop_early=check)
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return [_result(Path(folder), rank, code, check) for rank, code in enumerate(codes)]


def _start(
    rank: int,
    count: int,
    port: int,
    file: str | Path,
    function: str,
    arguments: Mapping[str, Any],
    folder: str,
    environment: Mapping[str, str],
) -> "subprocess.Popen[bytes]":
    launched = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
    }
    command = [sys.executable, __file__, str(file), function, json.dumps(arguments), folder]
    with Path(folder, f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            command, env={**os.environ, **launched, **environment}, stdout=log, stderr=log
        )


def _wait(
    started: Sequence["subprocess.Popen[bytes]"],
    timeout_s: float,
    folder: Path,
    *,
    stop_early: bool,
) -> list[int]:
    """Exit codes of all; gives up at the first failure (if `stop_early`) or after the time."""
    deadline = monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in started]
        if all(code is not None for code in codes):
            return [code for code in codes if code is not None]
        failed = [rank for rank, code in enumerate(codes) if code]
        if (failed and stop_early) or monotonic() > deadline:
            sleep(1.0)  # let the others write why they failed
            why = f"ranks {failed} failed" if failed else f"not done after {timeout_s:.0f} s"
            logs = "\n".join(
                f"--- rank {rank}\n{Path(folder, f'{rank}.log').read_text()[-3000:]}"
                for rank in range(len(started))
            )
            raise ProcessesFailedError(f"{why}\n{logs}")
        sleep(0.02)


def _result(folder: Path, rank: int, code: int, check: bool) -> Any:
    path = folder / f"{rank}.json"
    log = (folder / f"{rank}.log").read_text()
    if code == 0 and path.exists():
        return json.loads(path.read_text())
    if check:
        raise ProcessesFailedError(f"rank {rank} exited with {code}\n{log[-4000:]}")
    return {"failed": log or str(code), "code": code}


def _main(file: str, function: str, arguments: str, folder: str) -> int:
    spec = spec_from_file_location("processes_target", file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(file)
    sys.path.insert(0, str(Path(file).parent))
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    try:
        result = getattr(module, function)(**json.loads(arguments))
    except Exception:
        traceback.print_exc()
        return 1
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
