"""Fork server of `processes.py`: imports torch once and forks the processes of all tests."""

import atexit
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

TORCHRUN = ["-m", "torch.distributed.run"]


def _serve() -> None:
    """Read a job per line of standard input, fork a parent for it, and print the parent's pid."""
    # The kernel then reaps parents that exit, so that their pids disappear. A handler could miss a
    # signal that arrives just before the read of the next job.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    importlib.import_module("torch._dynamo")  # FSDP imports it lazily
    modules: dict[str, ModuleType] = {}
    for line in sys.stdin:
        job = json.loads(line)
        for name in job.get("imports", ()):
            importlib.import_module(name)
        if "file" in job and job["file"] not in modules:
            modules[job["file"]] = _imported(job["file"])
        parent = os.fork()
        if parent == 0:
            _run_parent(job, modules.get(job.get("file")))
            os._exit(0)
        # The parent does this as well, and may have exited.
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(parent, parent)
        os.write(1, f"{parent}\n".encode())


def _run_parent(job: dict[str, Any], module: ModuleType | None) -> None:
    """Set up the process group and log of a job and fork its processes."""
    os.setpgid(0, 0)  # a group that can be killed as a unit
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - replaces the server's job pipe
    os.dup2(sys.stdin.fileno(), 0)
    folder = Path(job["folder"])
    _redirect(folder / "log")
    if module is None:
        _fork(folder, 1, lambda _: _run_command(job))
        return
    os.environ.update(job["environment"])
    _fork(folder, int(os.environ["WORLD_SIZE"]), lambda rank: _run_rank(rank, module, job))


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


def _redirect(out: Path, err: Path | None = None) -> None:
    """Redirect standard output and error to files, or both to `out`."""
    for stream, path in enumerate([out, err or out], start=1):
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, stream)
        os.close(log)


def _fork(folder: Path, count: int, run: Callable[[int], int]) -> None:
    """Fork `count` children and write their pids and exit codes to files."""
    ranks = {}
    for rank in range(count):
        child = os.fork()
        if child == 0:
            os._exit(run(rank))
        ranks[child] = rank
        _note(folder / f"{rank}.pid", child)
    while ranks:
        child, status = os.wait()
        _note(folder / f"{ranks.pop(child)}.code", os.waitstatus_to_exitcode(status))


def _note(path: Path, number: int) -> None:
    """Write a number to a file atomically."""
    temporary = path.with_suffix(".partial")
    temporary.write_text(str(number))
    temporary.replace(path)


def _run_rank(rank: int, module: ModuleType, job: dict[str, Any]) -> int:
    """Run the job's function as one rank, with its output in a log; return the exit code."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    folder = Path(job["folder"])
    _redirect(folder / f"{rank}.log")
    try:
        result = getattr(module, job["function"])(**json.loads(job["arguments"]))
        (folder / f"{rank}.json").write_text(json.dumps(result))
        code = 0
    except Exception:
        traceback.print_exc()
        code = 1
    _finish()
    return code


def _run_command(job: dict[str, Any]) -> int:
    """Run a command with its environment, folder and output files; return the exit code."""
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["at"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _redirect(Path(job["out"]), Path(job["err"]))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    words = job["words"]
    if words[:2] != TORCHRUN:
        return _perform(words)
    launcher = importlib.import_module("torch.distributed.run")
    parsed = launcher.parse_args(words[2:])
    program = words[-1 - len(parsed.training_script_args) :]
    options = words[2 : -len(program)]
    if parsed.module:
        options.remove("-m")
        program = ["-m", *program]
    forking = ["--start-method", "fork", "--run-path", __file__]
    return _call(lambda: launcher.main([*options, *forking, *program]))


def _perform(words: list[str]) -> int:
    """Run a module or script like the Python interpreter and return the exit code."""
    if words[0] == "-m":
        sys.argv = words[1:]
        return _call(lambda: runpy.run_module(words[1], run_name="__main__", alter_sys=True))
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).absolute().parent))
    return _call(lambda: runpy.run_path(words[0], run_name="__main__"))


def _call(main: Callable[[], object]) -> int:
    """Call `main` and return the exit code that the interpreter would use."""
    try:
        main()
        code: object = 0
    except SystemExit as exit_:
        code = exit_.code or 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        try:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            code = 1
        except SystemExit as exit_:
            code = exit_.code or 0
    _finish()
    return code if isinstance(code, int) else 1


def _finish() -> None:
    """Run exit handlers and flush output, since a forked process ends by `os._exit`."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _run_torchrun_rank(words: list[str]) -> None:
    """Run the command of a rank; exit immediately on a failure or after a signal.

    Otherwise torch's wrapper would lose the exit code and wait for its agent, which in turn waits
    for the rank: a deadlock that the agent ends by killing the rank after 30 seconds.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    code, signals = _perform(words), b""
    with suppress(BlockingIOError):
        signals = os.read(read_end, 64)
    if code or signals:
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:]:
        _run_torchrun_rank(sys.argv[1:])
    else:
        _serve()
