"""Current position of this process, for the heartbeat to read.

An update is an attribute assignment of about 30 ns, cheap enough for every action of a schedule.
The line of code is not stored but read from the thread's stack on demand.
"""

import os
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

import msgspec

TORCH = f"{os.sep}torch{os.sep}"
DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
TENSORS = f"{DISTRIBUTED}tensor{os.sep}"
"""DTensor runs its own frames; only its redistribution communicates."""
COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py", "_fsdp_collectives.py")
WRAPPERS = frozenset({"wrapper", "inner", "__call__", "_fn", "decorate_context"})
"""Functions around a collective that do not identify it."""

Line = tuple[str, int, str]
"""(file, line, function)."""


class RankPosition(msgspec.Struct, frozen=True, kw_only=True, tag="position.v1"):
    """Position of a rank, as sent to the others."""

    rank: int
    host: str
    pid: int
    machine: str
    """Identifies the PID namespace: processes with equal values see each other in /proc."""
    born: int
    """Start time of the process from /proc, as PIDs are reused."""
    beat: int
    """Increases as long as the process runs and is not stopped."""
    step: int
    """Current step; 0 before the first."""
    activity: str
    waits_in: str
    """Collective or message it waits for; empty if it is computing."""
    lost: bool
    """Whether it has lost another rank and is about to exit."""
    line: str
    """File, line and function of the innermost frame outside of torch."""


class Position:
    """Current position of this process; the only instance is `position`."""

    def __init__(self) -> None:
        self.start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        """Name of this start of the processes; see `ms_parallel.cluster.start`."""
        self.step = 0
        self.passes = 0
        """Number of schedules run so far."""
        self.activity = "the start"
        self.action: object | None = None
        """Current action of a pipeline schedule."""
        self.message: tuple[tuple[int, int, str], int] | None = None
        """Awaited message: (stage, microbatch, direction), and the rank that sends it."""
        self.patient = False
        """Whether this rank waits for rank 0's action, without a limit."""
        self.thread = threading.main_thread().ident
        self.machine = _machine()
        self._beat = 0
        self._raised: list[Line] | None = None

    @property
    def progress(self) -> tuple[object, ...]:
        """A value that changes whenever this process advances."""
        return self.step, self.passes, self.activity, self.action, self.message

    def raised(self, trace: TracebackType | None) -> None:
        """From now on, report the position where an error was raised instead of the current one."""
        self._raised = _traceback_lines(trace)

    def record(self, rank: int) -> RankPosition:
        """Return this process's current record."""
        self._beat += 1
        lines = self._raised
        if lines is None:
            # The stack of the main thread, read from the heartbeat's thread.
            lines = list(_frame_lines(sys._current_frames().get(self.thread or 0)))
        return RankPosition(
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=self.machine,
            born=_start_ticks(),
            beat=self._beat,
            step=self.step,
            activity=self._activity(),
            waits_in=self._waits_in(lines),
            line=_innermost_line(lines),
            lost=self._raised is not None,
        )

    def _activity(self) -> str:
        return self.activity if self.action is None else f"{self.activity}, {self.action}"

    def _waits_in(self, lines: list[Line]) -> str:
        if self.message is not None:
            (stage, microbatch, direction), peer = self.message
            tensor_name = "hidden state" if direction == "F" else "gradient"
            return (
                f"recv of the {tensor_name} of stage {stage}, microbatch {microbatch},"
                f" from rank {peer}"
            )
        # Waiting in a collective if the innermost frame is torch.distributed's, but not DTensor's.
        if not lines or DISTRIBUTED not in lines[0][0] or TENSORS in lines[0][0]:
            return ""
        return _collective(list(_torch_frames(lines)))


def _collective(lines: list[Line]) -> str:
    """Function that was called, from torch's frames, innermost first."""
    for module in COLLECTIVES:
        # Innermost first, so the last is the function that the program called.
        calls = [name for file, _, name in lines if file.endswith(module) and name not in WRAPPERS]
        if calls:
            return calls[-1]
    names = [f"{Path(file).stem}.{name}" for file, _, name in lines if DISTRIBUTED in file]
    return names[-1]


def _machine() -> str:
    try:
        # Boot ID and PID namespace: containers on one host cannot see each other's processes.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"process {os.getpid()} of {socket.gethostname()}"


def _start_ticks() -> int:
    try:
        stat = Path("/proc/self/stat").read_text()
    except OSError:
        return 0
    # Field 22 (starttime). The command name before `)` may contain spaces.
    return int(stat[stat.rindex(")") + 2 :].split()[19])


def _frame_lines(frame: FrameType | None) -> Iterator[Line]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _traceback_lines(trace: TracebackType | None) -> list[Line]:
    lines: list[Line] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return lines[::-1]  # innermost first, as in `_frame_lines`


def _torch_frames(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield torch's frames above the innermost frame outside of torch."""
    for line in lines:
        if TORCH not in line[0]:
            return
        yield line


def _innermost_line(lines: list[Line]) -> str:
    for file, line, name in lines:
        if TORCH not in file:
            return f"{_short(file)}:{line} in {name}"
    return "an unknown line"


def _short(file: str) -> str:
    """Make a path relative to the folder that packages are imported from."""
    # Longest folder first, as one folder may contain another.
    for folder in sorted(sys.path, key=len, reverse=True):
        if folder and Path(file).is_relative_to(folder):
            return str(Path(file).relative_to(folder))
    return file


position = Position()
"""Position of this process."""
