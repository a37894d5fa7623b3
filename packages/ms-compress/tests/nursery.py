"""Be the nursery of `processes.py`: import once, and fork whatever tests start."""

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
    """Be the nursery: fork a parent for each line of standard input, and tell its number."""
    signal.signal(signal.SIGCHLD, _reap)
    importlib.import_module("torch._dynamo")  # which FSDP imports when it is first asked
    modules: dict[str, ModuleType] = {}
    for line in sys.stdin:
        job = json.loads(line)
        for name in job.get("imports", ()):
            importlib.import_module(name)
        if "file" in job and job["file"] not in modules:
            modules[job["file"]] = _imported(job["file"])
        parent = os.fork()
        if parent == 0:
            _be_parent(job, modules.get(job.get("file")))
            os._exit(0)
        with suppress(ProcessLookupError, PermissionError):  # it has done so, and may be gone
            os.setpgid(parent, parent)
        os.write(1, f"{parent}\n".encode())


def _be_parent(job: dict[str, Any], module: ModuleType | None) -> None:
    """Fork the job's processes."""
    os.setpgid(0, 0)  # so that all can be killed together
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - the nursery's is not theirs
    os.dup2(sys.stdin.fileno(), 0)
    folder = Path(job["folder"])
    _redirect(folder / "log")
    if module is None:
        _fork(folder, 1, lambda _: _be_command(job))
        return
    os.environ.update(job["environment"])
    _fork(folder, int(os.environ["WORLD_SIZE"]), lambda rank: _be(rank, module, job))


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


def _redirect(out: Path, err: Path | None = None) -> None:
    """Send whatever this process prints to a file, or to two."""
    for stream, path in enumerate([out, err or out], start=1):
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, stream)
        os.close(log)


def _fork(folder: Path, count: int, be: Callable[[int], int]) -> None:
    """Fork so many children, note their numbers, and how each ends."""
    ranks = {}
    for rank in range(count):
        child = os.fork()
        if child == 0:
            os._exit(be(rank))
        ranks[child] = rank
        _note(folder / f"{rank}.pid", child)
    while ranks:
        child, status = os.wait()
        _note(folder / f"{ranks.pop(child)}.code", os.waitstatus_to_exitcode(status))


def _note(path: Path, number: int) -> None:
    """Write a file that is whole whenever it is there."""
    aside = path.with_suffix(".aside")
    aside.write_text(str(number))
    aside.replace(path)


def _be(rank: int, module: ModuleType, job: dict[str, Any]) -> int:
    """Be one rank: everything that this process prints goes to its log."""
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


def _be_command(job: dict[str, Any]) -> int:
    """Be a command: with its own variables, folder, words and files to print to."""
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
    asked = launcher.parse_args(words[2:])
    program = words[-1 - len(asked.training_script_args) :]
    options = words[2 : -len(program)]
    if asked.module:
        options.remove("-m")
        program = ["-m", *program]
    forking = ["--start-method", "fork", "--run-path", __file__]
    return _call(lambda: launcher.main([*options, *forking, *program]))


def _perform(words: list[str]) -> int:
    """Run a module or a script as the interpreter does, and give the exit code."""
    if words[0] == "-m":
        sys.argv = words[1:]
        return _call(lambda: runpy.run_module(words[1], run_name="__main__", alter_sys=True))
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).absolute().parent))
    return _call(lambda: runpy.run_path(words[0], run_name="__main__"))


def _call(main: Callable[[], object]) -> int:
    """Call `main` and return the exit code with which the interpreter would end."""
    try:
        main()
        code: object = 0
    except SystemExit as ended:
        code = ended.code or 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        try:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            code = 1
        except SystemExit as ended:
            code = ended.code or 0
    _finish()
    return code if isinstance(code, int) else 1


def _finish() -> None:
    """Do what the interpreter does at its end, which a forked process does not come to."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _be_rank_of_torchrun(words: list[str]) -> None:
    """Perform the words; who fails, or was sent a signal, ends at once.

    torch's wrapper would let none say its code, and would wait for its agent, which then waits for
    the rank's end itself: half a minute, after which it kills it.
    """
    read, written = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written)
    code, signals = _perform(words), b""
    with suppress(BlockingIOError):
        signals = os.read(read, 64)
    if code or signals:
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:]:
        _be_rank_of_torchrun(sys.argv[1:])
    else:
        _serve()
