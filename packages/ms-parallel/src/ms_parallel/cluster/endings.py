"""Ends a run that cannot go on: one line from one process, and an exit code for the cause.

2 is for what the user can mend (a setting, a file, a full disk), 1 for the rest.
"""

import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from ms_parallel.cluster.failures import LOST
from ms_parallel.cluster.process import is_first, launched, rank, world_size
from ms_parallel.cluster.watch import Heartbeat, lost_contact, position
from ms_parallel.entry import BAD_INPUT, FAILED, INTERRUPTED, exit_code, one_line
from ms_parallel.errors import LaunchError

GOES_ON = "the same command resumes from the last complete checkpoint"


def report_error(error: BaseException, *, command: str = "ms-parallel") -> int | None:
    """Print one line, once for all processes, that says why a run ends.

    The line names a process that is missing, and the last position of each.

    Args:
        error: error that ends this process.
        command: program name that begins the line.

    Returns:
        The exit code; None for an error that needs its traceback.
    """
    found = _exit_of(error)
    if found is None:
        return None
    code, line = found
    if code == INTERRUPTED:  # came to all at once
        if is_first():
            _say(command, line)
        return code
    # A process that met nobody speaks for itself, and has no store to ask.
    if isinstance(error, LaunchError) or not launched():
        _say(command, line)
        return code
    position.raised(error.__traceback__)
    heartbeat = Heartbeat.running or Heartbeat(rank(), world_size(), 1.0)
    with _undisturbed():
        if heartbeat.speaks_first("mistake" if code == BAD_INPUT else "loss"):
            missing = heartbeat.who_is_missing() if _is_lost(error) else None
            if missing is None and _is_lost(error) and heartbeat.rank:
                missing = lost_contact(heartbeat.rank)
            _say(command, f"{missing}; {GOES_ON}" if missing else line)
            heartbeat.has_spoken()
        else:
            heartbeat.wait_until_spoken()
    return code


def end_scripts_plainly() -> None:
    """Let an error that nobody handles end a script as it ends the command.

    A script that is started by torchrun would else print a traceback for each process, over a
    setting that is wrong. Whoever catches the error sees it as it is, and a hook that somebody
    else has set stays.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # torch's own hook around this one gathers what is said, and loses it where one exits.
    sys.stderr = sys.__stderr__
    code = report_error(error)
    if code is None:
        sys.__excepthook__(kind, error, trace)
    else:
        sys.exit(code)


def _exit_of(error: BaseException) -> tuple[int, str] | None:
    """Return the exit code and the line of an error that a line can explain; None for any other."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, f"interrupted; {GOES_ON}"
    code = exit_code(error)
    if code is not None:
        return code, " ".join(str(error).split())
    if _is_lost(error):
        reason = re.sub(r"^\[\S+\] ", "", " ".join(str(error).split())).split(". ")[0][:160]
        return FAILED, f"rank {rank()} lost another process ({reason}); {GOES_ON}"
    return None


def _is_lost(error: BaseException) -> bool:
    """Return whether this is what torch raises where another process does not come."""
    of_torch = isinstance(error, RuntimeError) and exit_code(error) is None
    return of_torch and launched() and bool(LOST.search(str(error)))


def _say(command: str, line: str) -> None:
    print(f"{command}: {one_line(line)}", file=sys.stderr, flush=True)  # noqa: T201 - the command's last word


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let no SIGTERM of torchrun's end a process in the seconds in which one speaks for all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
