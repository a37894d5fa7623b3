"""How a run that cannot go on ends: one line from one process, and an exit code that tells why.

2 is for what the user can mend (a setting, a file, a full disk), 1 for the rest.
"""

import os
import re
import sys
import time
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from ms_parallel.errors import LaunchError, ParallelError, StageError
from ms_parallel.failures import LOST
from ms_parallel.launch import is_first, launched

__all__ = ["end_scripts_plainly", "report"]

BAD_INPUT, FAILED = 2, 1
SETTLE_S = 0.3
"""Lets the one that speaks be heard before torchrun ends it because another has exited."""


def report(error: BaseException) -> int | None:
    """Say in one line, once for all processes, why a run ends.

    Returns:
        The exit code; None if this is no error to be told in a line, and wants its traceback.
    """
    told = _told(error)
    if told is None:
        return None
    code, line = told
    # A process that met nobody speaks for itself, and has no store to ask.
    if isinstance(error, LaunchError) or _speaks("mistake" if code == BAD_INPUT else "loss"):
        print(f"error: {line}", file=sys.stderr, flush=True)  # noqa: T201 - the command's last word
    elif launched():
        time.sleep(SETTLE_S)
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
    code = report(error)
    if code is None:
        sys.__excepthook__(kind, error, trace)
    else:
        sys.exit(code)


def _told(error: BaseException) -> tuple[int, str] | None:
    """Exit code and line of an error that a line can tell."""
    if isinstance(error, StageError):
        return FAILED, str(error)
    if isinstance(error, ParallelError) or _is_of_ms_data(error):
        return getattr(error, "exit_code", BAD_INPUT), " ".join(str(error).split())
    if isinstance(error, RuntimeError) and launched() and LOST.search(str(error)):
        reason = re.sub(r"^\[\S+\] ", "", " ".join(str(error).split())).split(". ")[0][:160]
        return FAILED, (
            f"rank {os.environ['RANK']} lost another process ({reason}); the same command goes"
            " on from the last complete checkpoint"
        )
    return None


def _is_of_ms_data(error: BaseException) -> bool:
    """Without importing ms-data, which a run need not have."""
    data = sys.modules.get("ms_data")
    return data is not None and isinstance(error, data.DataError)


def _speaks(what: str) -> bool:
    """Whether this process is the first of all that has something to say of this sort."""
    if not launched():
        return True
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # torch does not list it
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=2),
            wait_for_workers=False,
        )
        said: int = store.add(f"ms-parallel/said-{what}-{attempt}", 1)
    except (dist.DistError, RuntimeError, ValueError):
        return is_first()
    return said == 1
