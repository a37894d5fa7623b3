"""Records what this process is doing, for the heartbeat to read.

A note is an assignment to an attribute, some 30 ns, so that it may stand in every action of a
schedule. The line is not noted at all: it is read off the thread's stack when it is wanted.
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
"""DTensor computes in its own frames; only its redistribution communicates."""
COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py", "_fsdp_collectives.py")
WRAPPERS = frozenset({"wrapper", "inner", "__call__", "_fn", "decorate_context"})
"""Functions around a collective that say nothing of it."""

Line = tuple[str, int, str]
"""File, line, function."""


class Record(msgspec.Struct, frozen=True, kw_only=True, tag="position.v1"):
    """Where one rank stands, as it goes to the others."""

    rank: int
    host: str
    pid: int
    machine: str
    """Processes of one value see one another in /proc."""
    born: int
    """When the process began, as /proc has it: numbers of processes are used again."""
    beat: int
    """Counts up as long as the process lives and is not stopped."""
    step: int
    """Step that is being made; 0 before the first."""
    activity: str
    waits_in: str
    """The collective or message that it waits for; nothing if it does something itself."""
    lost: bool
    """Whether it has lost another rank itself, and is about to end."""
    line: str
    """File, line and function, the innermost outside of torch."""


class Position:
    """What this process is doing; one for each process, as `position`."""

    def __init__(self) -> None:
        self.start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        """Which start of the processes this is; see `ms_parallel.cluster.start`."""
        self.step = 0
        self.passes = 0
        """Performances of a schedule so far."""
        self.activity = "the start"
        self.action: object | None = None
        """Action of a pipeline schedule that is being performed; its text says which."""
        self.message: tuple[tuple[int, int, str], int] | None = None
        """The message waited for: (stage, microbatch, direction), and the rank that sends it."""
        self.patient = False
        """Whether this rank waits, without a limit, for what rank 0 does alone."""
        self.thread = threading.main_thread().ident
        self.machine = _machine()
        self._beat = 0
        self._raised: list[Line] | None = None

    @property
    def progress(self) -> tuple[object, ...]:
        """Changes with whatever this process does next."""
        return self.step, self.passes, self.activity, self.action, self.message

    def raised(self, trace: TracebackType | None) -> None:
        """Report from now on where an error was raised, not where it is reported."""
        self._raised = _of_traceback(trace)

    def record(self, rank: int) -> Record:
        """Record where this process stands now."""
        self._beat += 1
        lines = self._raised
        if lines is None:
            lines = list(_of_frame(sys._current_frames().get(self.thread or 0)))
        return Record(
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=self.machine,
            born=_born(),
            beat=self._beat,
            step=self.step,
            activity=self._activity(),
            waits_in=self._waits_in(lines),
            line=_own_line(lines),
            lost=self._raised is not None,
        )

    def _activity(self) -> str:
        return self.activity if self.action is None else f"{self.activity}, {self.action}"

    def _waits_in(self, lines: list[Line]) -> str:
        if self.message is not None:
            (stage, microbatch, direction), peer = self.message
            what = "hidden state" if direction == "F" else "gradient"
            return f"recv of the {what} of stage {stage}, microbatch {microbatch}, from rank {peer}"
        if not lines or DISTRIBUTED not in lines[0][0] or TENSORS in lines[0][0]:
            return ""
        return _collective(list(_until_own(lines)))


def _collective(lines: list[Line]) -> str:
    """Find the function that was called, from torch's frames, the innermost first."""
    for room in COLLECTIVES:
        found = [name for file, _, name in lines if file.endswith(room) and name not in WRAPPERS]
        if found:
            return found[-1]
    names = [f"{Path(file).stem}.{name}" for file, _, name in lines if DISTRIBUTED in file]
    return names[-1]


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"process {os.getpid()} of {socket.gethostname()}"


def _born() -> int:
    try:
        stat = Path("/proc/self/stat").read_text()
    except OSError:
        return 0
    return int(stat[stat.rindex(")") + 2 :].split()[19])


def _of_frame(frame: FrameType | None) -> Iterator[Line]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _of_traceback(trace: TracebackType | None) -> list[Line]:
    lines: list[Line] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return lines[::-1]


def _until_own(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield torch's frames, the innermost first, up to one that is not torch's."""
    for line in lines:
        if TORCH not in line[0]:
            return
        yield line


def _own_line(lines: list[Line]) -> str:
    for file, line, name in lines:
        if TORCH not in file:
            return f"{_short(file)}:{line} in {name}"
    return "an unknown line"


def _short(file: str) -> str:
    """Cut off the folder that packages are imported from."""
    for folder in sorted(sys.path, key=len, reverse=True):
        if folder and Path(file).is_relative_to(folder):
            return str(Path(file).relative_to(folder))
    return file


position = Position()
"""This process's."""
