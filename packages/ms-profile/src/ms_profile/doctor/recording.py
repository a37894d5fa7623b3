"""Values of a recording: facts, files and command outputs of each rank, and joint measurements.

Checks use only these values, so they judge remote machines like this one.
"""

from functools import cached_property
from typing import Annotated, Final

import msgspec
from attrs import field, frozen

NO_ANSWER: Final = "no answer"
"""Output recorded for a tool that hung."""


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """A device."""

    name: str
    memory_bytes: int
    """0 if unknown."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a process and its machine."""

    rank: int = 0
    local_rank: int = 0
    """Rank on its machine; the first one records the machine."""
    node: int = 0
    """Index of the machine in the run."""
    host: str = ""
    """Machine name."""
    python: str = ""
    system: str = ""
    cores: int = 0
    """Number of cores available to this process."""
    affinity: list[int] = []
    """Core numbers; empty if unknown."""
    threads: int = 0
    """Computing threads of torch; 0 if unknown."""
    memory_bytes: int = 0
    free_disk_bytes: int = 0
    """Free bytes on the disk of the current folder."""
    shared_memory_bytes: int | None = None
    """Size of /dev/shm; None if unknown."""
    accelerators: list[Accelerator] = []
    device: str = "cpu"
    """Default device of a run."""
    backends: list[str] = []
    """Available backends of torch.distributed."""
    torchrun: str | None = None
    """Path of torchrun; None if it is not on PATH."""
    packages: dict[str, str | None] = {}
    """Versions; None if not installed."""
    torch_cuda: str | None = None
    """CUDA version of torch; None for a build without CUDA."""
    libraries: dict[str, str | None] = {}
    """Versions of libraries for collectives and RDMA; None if not found."""
    environment: dict[str, str] = {}
    """Variables that the collective libraries read."""


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """Clock offset of a rank relative to rank 0."""

    rank: int
    offset_s: float
    """Seconds by which the clock is ahead."""
    uncertainty_s: float
    """Half of the shortest round trip."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Latency and bandwidth between two ranks."""

    first: int
    second: int
    latency_us: float
    """One-way latency of the smallest message, in microseconds."""
    bandwidth_gb_per_s: float
    """One-way bandwidth of the largest message, in 10⁹ bytes per second."""


class Folder(msgspec.Struct, frozen=True, kw_only=True):
    """Test of the output folder by a rank."""

    rank: int
    path: str
    shared: bool | None
    """Whether it sees rank 0's file; None with one machine."""
    problem: str = ""
    """Reason why the folder cannot be written; empty if it can."""
    write_mb_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Write rate of one process including sync, in 10⁶ bytes per second; None if not measured."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="doctor-measured-1"):
    """Joint measurements of all ranks."""

    backend: str = ""
    """Backend of the messages between pairs, such as `nccl`."""
    clocks: list[Clock] = []
    pairs: list[Pair] = []
    together: bool = False
    """Whether several pairs were measured at the same time."""
    folders: list[Folder] = []
    log: str = ""
    """Log of the collective library's initialization."""


class MachineRecording(msgspec.Struct, frozen=True, kw_only=True, tag="doctor-rank-1"):
    """Recording of a rank: its facts, and files and outputs of its machine."""

    machine: Machine = Machine()
    files: dict[str, str] = {}
    """Texts by path without the leading slash; empty for files that are not text."""
    commands: dict[str, str] = {}
    """Outputs by command line; missing commands are absent."""

    @property
    def node(self) -> tuple[int, str]:
        """Index and name of its machine."""
        return self.machine.node, self.machine.host

    def text(self, path: str) -> str | None:
        """Stripped content of a file; None if it does not exist."""
        content = self.files.get(path)
        return None if content is None else content.strip()

    def names(self, folder: str) -> list[str]:
        """Sorted names of the entries of a folder."""
        start = folder.rstrip("/") + "/"
        relative = (path[len(start) :] for path in self.files if path.startswith(start))
        return sorted({path.split("/", 1)[0] for path in relative})

    def output(self, *words: str) -> str | None:
        """Output of a command; None if the command does not exist."""
        return self.commands.get(" ".join(words))


@frozen(kw_only=True)
class Examined:
    """Input of the checks."""

    ranks: tuple[MachineRecording, ...]
    """Recording of each rank, by rank."""
    measured: Measured = field(factory=Measured)

    @cached_property
    def machines(self) -> tuple[MachineRecording, ...]:
        """Recording of each machine, made by its first rank."""
        return tuple(self._by_node.values())

    def machine_of(self, recording: MachineRecording) -> MachineRecording:
        """Recording of a rank's machine."""
        return self._by_node[recording.node]

    @cached_property
    def _by_node(self) -> dict[tuple[int, str], MachineRecording]:
        by_node: dict[tuple[int, str], MachineRecording] = {}
        for recording in self.ranks:
            by_node.setdefault(recording.node, recording)
        return by_node
