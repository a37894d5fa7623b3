"""Run a script as `python script.py arguments` would, and report how it ended."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType

from attrs import frozen

from ms_profile.errors import CaptureError


@frozen
class ScriptExit:
    """Exit code and error of a script."""

    exit_code: int
    error: str | None
    """Last line of the traceback; None if the script did not raise."""


def run_script(script: Path, arguments: Sequence[str]) -> ScriptExit:
    """Execute a script as `__main__` in this process.

    Tracebacks are printed as Python prints them, without the profiler's frames, and the exit code
    equals Python's.

    Raises:
        CaptureError: the script does not exist or is not Python source.
    """
    if not script.is_file():
        raise CaptureError(f"script {script} does not exist; pass the path of a Python file")
    path = os.path.abspath(script)
    try:
        code = compile(script.read_bytes(), path, "exec")
    except ValueError as error:
        raise CaptureError(f"{script} must be Python source: {error}") from None
    except SyntaxError as error:
        traceback.print_exception(error.with_traceback(None), limit=0)
        return ScriptExit(1, f"SyntaxError: {error}")
    module = ModuleType("__main__")
    module.__dict__.update({"__file__": path, "__builtins__": __builtins__})
    # Worker processes and serializers look the script's classes up in `__main__`.
    sys.modules["__main__"] = module
    sys.argv = [str(script), *arguments]
    # As for `python script.py`: imports search the script's folder, with symlinks resolved.
    sys.path[0] = str(script.resolve().parent)
    try:
        exec(code, module.__dict__)
    except SystemExit as exit_request:
        return _script_exit(exit_request)
    except BaseException as error:
        _print(error)
        last = traceback.format_exception_only(error)[-1].strip()
        # 130 is the shell's code for a process that Ctrl-C ended.
        return ScriptExit(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1, last)
    return ScriptExit(0, None)


def _script_exit(exit_request: SystemExit) -> ScriptExit:
    """Convert the argument of `sys.exit` as the interpreter does."""
    if exit_request.code is None:
        return ScriptExit(0, None)
    if isinstance(exit_request.code, int):
        return ScriptExit(exit_request.code & 0xFF, None)  # the kernel passes on 8 bits
    print(exit_request.code, file=sys.stderr)  # noqa: T201 - the interpreter prints it here
    return ScriptExit(1, str(exit_request.code))


def _print(error: BaseException) -> None:
    """Print a traceback through `sys.excepthook`, starting at the script's first frame."""
    frames = error.__traceback__
    script_frames = frames.tb_next if frames is not None else None
    sys.excepthook(type(error), error.with_traceback(script_frames), script_frames)


class Termination:
    """Save the recording before SIGTERM ends this process; launchers send it when a rank fails.

    The process still dies of the signal, but not in the middle of `saving`. A handler that the
    script installs replaces this one.
    """

    def __init__(self, save: Callable[[], None]) -> None:
        self._save = save
        self._saving = self._requested = False
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Delay the termination until the block is done."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False
            if self._requested:
                _die()

    def _handle(self, _: int, __: FrameType | None) -> None:
        self._requested = True
        if not self._saving:
            with self.saving():
                self._save()


def _die() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
