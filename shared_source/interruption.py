"""Interruption of a run from outside: by a signal, or by the death of torchrun.

torchrun stops its ranks with a signal. If torchrun itself is killed, orphaned ranks would keep
training and keep the output folder locked. Therefore a rank asks the kernel to kill it when its
parent dies (PR_SET_PDEATHSIG, set by the training thread, since it applies per thread). A rank that
was orphaned before this call notices that its parent pid has changed. If torchrun dies in the few
milliseconds before this module is imported, rendezvous fails because the store is gone. On systems
without PR_SET_PDEATHSIG, `launcher_is_gone` is polled.

The command and the trainer enable this in ranks of torchrun only, and never at import: a process
that was started in the background of a shell must survive the shell.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from .entry import FAILED

FINISHED_FOLDER = "MS_FINISHED_FOLDER"
"""Environment variable of a job script: folder on its machine for the mark of a finished run."""
PR_SET_PDEATHSIG = 1
STARTED = (os.getpid(), os.getppid())
"""Pid and parent pid at import, as early as possible."""


def started_by_torchrun() -> bool:
    """Return True if this process is a rank of torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_launcher() -> None:
    """Make this process die with torchrun; no effect if torchrun did not start it."""
    if not started_by_torchrun():
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if launcher_is_gone():
        os._exit(FAILED)


def launcher_is_gone() -> bool:
    """Return True if the torchrun that started this process is dead: the parent pid changed."""
    process, parent = STARTED  # a fork of this process has a different parent anyway
    return started_by_torchrun() and os.getpid() == process and os.getppid() != parent


def mark_finished() -> None:
    """Tell the job script that this run is complete and need not be started again.

    Exit codes cannot tell: a signalled torchrun fails even if its ranks finished, and a rank that
    stopped after its checkpoint succeeds. No effect without the script's folder, which is on one
    of the machines only.
    """
    folder = Path(os.environ.get(FINISHED_FOLDER, ""))
    if FINISHED_FOLDER in os.environ and folder.is_dir():
        (folder / "finished").touch()


class StopSignal:
    """Stop request to this process: SIGTERM or a first Ctrl-C."""

    def __init__(self) -> None:
        self.signal_name = ""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record the signals instead of dying; a second Ctrl-C interrupts immediately."""
        try:
            old_handlers = {
                number: signal.signal(number, self._on_signal)
                for number in (signal.SIGTERM, signal.SIGINT)
            }
        except ValueError:  # only the main thread can set signal handlers
            old_handlers = {}
        try:
            yield
        finally:
            for number, handler in old_handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
