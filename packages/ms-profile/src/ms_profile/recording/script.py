"""Run a script as `python script.py arguments` would, and learn how it ended."""

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
    """How a script ended."""

    exit_code: int
    error: str | None
    """The last line of its traceback; None when it did not fail by an exception."""


def run_script(script: Path, arguments: Sequence[str]) -> ScriptExit:
    """Execute a script as `__main__` in this process.

    Its traceback is printed as Python prints it, without the frames of the profiler; the exit code
    is what Python's would have been.

    Raises:
        CaptureError: there is no such script, or it is no Python source.
    """
    if not script.is_file():
        raise CaptureError(f"there is no script {script}; give the path of a Python file")
    path = os.path.abspath(script)
    try:
        code = compile(script.read_bytes(), path, "exec")
    except ValueError as error:
        raise CaptureError(f"{script} is no Python source: {error}") from None
    except SyntaxError as error:
        traceback.print_exception(error.with_traceback(None), limit=0)
        return ScriptExit(1, f"SyntaxError: {error}")
    module = ModuleType("__main__")
    module.__dict__.update({"__file__": path, "__builtins__": __builtins__})
    sys.modules["__main__"] = module
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        exec(code, module.__dict__)
    except SystemExit as ending:
        return _exit_of(ending)
    except BaseException as error:
        _print(error)
        last = traceback.format_exception_only(error)[-1].strip()
        return ScriptExit(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1, last)
    return ScriptExit(0, None)


def _exit_of(ending: SystemExit) -> ScriptExit:
    """Return what `sys.exit(code)` makes of its argument."""
    if ending.code is None:
        return ScriptExit(0, None)
    if isinstance(ending.code, int):
        return ScriptExit(ending.code & 0xFF, None)
    print(ending.code, file=sys.stderr)  # noqa: T201 - Python itself prints it here
    return ScriptExit(1, str(ending.code))


def _print(error: BaseException) -> None:
    """Print the traceback from the script's own first frame on, by the script's own hook."""
    frames = error.__traceback__
    own = frames.tb_next if frames is not None else None
    sys.excepthook(type(error), error.with_traceback(own), own)


class Termination:
    """Save before SIGTERM ends this process, as a launcher sends it when another rank failed.

    The process still dies of the signal, but not in the middle of `saving`. A script that sets its
    own handler replaces this one.
    """

    def __init__(self, save: Callable[[], None]) -> None:
        self._save = save
        self._saving = self._asked = False
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Put the end off until what is inside is done."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False
            if self._asked:
                _die()

    def _handle(self, _: int, __: FrameType | None) -> None:
        self._asked = True
        if not self._saving:
            with self.saving():
                self._save()


def _die() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
