"""Ends a failed run with one line from one process, and an exit code for the cause.

Exit code 2 is for errors that the user can fix (a setting, a file, a full disk), 1 for all others.
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

RESUMES = "the same command resumes from the last complete checkpoint"


def report_error(error: BaseException, *, command: str = "ms-parallel") -> int | None:
    """Print the reason why a run ends on one line, once for all processes.

    The line names missing processes and the last position of each rank.

    Args:
        error: error that ends this process.
        command: program name at the start of the line.

    Returns:
        The exit code; None for an error that needs its traceback.
    """
    exit_report = _exit_code_and_line(error)
    if exit_report is None:
        return None
    code, line = exit_report
    if code == INTERRUPTED:  # received by all at once
        if is_first():
            _print(command, line)
        return code
    # A process that could not connect reports its own error, and has no store to ask.
    if isinstance(error, LaunchError) or not launched():
        _print(command, line)
        return code
    position.raised(error.__traceback__)
    heartbeat = Heartbeat.running or Heartbeat(rank(), world_size(), 1.0)
    with _ignore_sigterm():
        if heartbeat.claim_report("mistake" if code == BAD_INPUT else "loss"):
            missing = heartbeat.explain_missing() if _is_lost_peer(error) else None
            if missing is None and _is_lost_peer(error) and heartbeat.rank:
                missing = lost_contact(heartbeat.rank)
            _print(command, f"{missing}; {RESUMES}" if missing else line)
            heartbeat.finish_report()
        else:
            heartbeat.wait_for_report()
    return code


def install_exception_hook() -> None:
    """Install an exception hook that ends a script with one line, as the command does.

    Without this, every process of a script under torchrun would print a traceback for a wrong
    setting. Errors that the script catches are not affected, and an existing hook is kept.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _hook


def _hook(
    error_type: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    # torch's hook around this one captures stderr, which would be lost on exit.
    sys.stderr = sys.__stderr__
    code = report_error(error)
    if code is None:
        sys.__excepthook__(error_type, error, trace)
    else:
        sys.exit(code)


def _exit_code_and_line(error: BaseException) -> tuple[int, str] | None:
    """Return exit code and message of an expected error; None for errors that need a traceback."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, f"interrupted; {RESUMES}"
    code = exit_code(error)
    if code is not None:
        return code, one_line(str(error))
    if _is_lost_peer(error):
        reason = re.sub(r"^\[\S+\] ", "", one_line(str(error))).split(". ")[0][:160]
        return FAILED, f"rank {rank()} lost another process ({reason}); {RESUMES}"
    return None


def _is_lost_peer(error: BaseException) -> bool:
    """Return whether torch raised this because another process has exited."""
    from_torch = isinstance(error, RuntimeError) and exit_code(error) is None
    return from_torch and launched() and bool(LOST.search(str(error)))


def _print(command: str, line: str) -> None:
    print(f"{command}: {one_line(line)}", file=sys.stderr, flush=True)  # noqa: T201 - last line of a command


@contextmanager
def _ignore_sigterm() -> Iterator[None]:
    """Ignore torchrun's SIGTERM while one process reports for all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
