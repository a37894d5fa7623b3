"""The values of a recording: one rank's facts, files and command outputs; all ranks' measurements.

Checks see nothing but these, so that they judge a machine that is far away as they judge this one.
"""

from functools import cached_property
from typing import Annotated, Any

import msgspec
from attrs import field, frozen

NO_ANSWER = "no answer"
"""In place of the output of a tool that did not end."""


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One device."""

    name: str
    memory_bytes: int
    """0 where the device does not say."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What one process knows of itself and of its machine."""

    rank: int = 0
    local_rank: int = 0
    """Number of the process on its machine; the first one records for all of them."""
    node: int = 0
    """Number of the machine in the run."""
    host: str = ""
    """Name of the machine."""
    python: str = ""
    system: str = ""
    cores: int = 0
    """Cores that this process may use."""
    memory_bytes: int = 0
    free_disk_bytes: int = 0
    """Free bytes on the disk of the current folder."""
    shared_memory_bytes: int | None = None
    """Size of /dev/shm; None where it is not known."""
    accelerators: list[Accelerator] = []
    device: str = "cpu"
    """Device that a run uses if none is asked for."""
    backends: list[str] = []
    """Backends of torch.distributed that are here."""
    torchrun: str | None = None
    """Path of torchrun; None if it is not on PATH."""
    packages: dict[str, str | None] = {}
    """Versions; None is not installed."""
    torch_cuda: str | None = None
    """CUDA that torch was built for; None for a build without."""
    libraries: dict[str, str | None] = {}
    """Versions of the libraries that collectives and RDMA need; None is not found."""
    environment: dict[str, str] = {}
    """Variables that the collective libraries read."""


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank's clock is from that of rank 0."""

    rank: int
    offset_s: float
    """Seconds that the clock is ahead."""
    uncertainty_s: float
    """Half of the shortest round trip in which the offset was estimated."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """What messages between two ranks took."""

    first: int
    second: int
    latency_us: float
    """Microseconds that the smallest message takes one way."""
    bandwidth_gb_per_s: float
    """10⁹ bytes that the largest message moves in a second, one way."""


class Folder(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank found at the folder of the run."""

    rank: int
    path: str
    shared: bool | None
    """Whether it reads what rank 0 wrote there; None where there is one machine alone."""
    problem: str = ""
    """Why nothing can be written there; empty where it can."""
    write_mb_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """10⁶ bytes that one process writes and syncs in a second; None where not measured."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="doctor-measured-1"):
    """What all ranks measured together."""

    backend: str = ""
    """Backend of the messages between pairs, such as `nccl`."""
    clocks: list[Clock] = []
    pairs: list[Pair] = []
    together: bool = False
    """Whether several pairs sent at the same time."""
    folders: list[Folder] = []
    log: str = ""
    """What the collective library said while it started."""


class Recording(msgspec.Struct, frozen=True, kw_only=True, tag="doctor-rank-1"):
    """One rank: its facts, and what was read on its machine."""

    machine: Machine = Machine()
    files: dict[str, str] = {}
    """Texts by path, without the leading slash; names of what is no text file have an empty one."""
    commands: dict[str, str] = {}
    """Outputs by command line; a command that is not there is absent."""

    def text(self, path: str) -> str | None:
        """Return the stripped content of a file; None where there is none."""
        found = self.files.get(path)
        return None if found is None else found.strip()

    def names(self, folder: str) -> list[str]:
        """List what lies in a folder, sorted."""
        start = folder.rstrip("/") + "/"
        below = (path[len(start) :] for path in self.files if path.startswith(start))
        return sorted({path.split("/", 1)[0] for path in below})

    def output(self, *words: str) -> str | None:
        """Return what a command printed; None where there is no such command."""
        return self.commands.get(" ".join(words))


def _sorted(recordings: Any) -> tuple[Recording, ...]:
    return tuple(sorted(recordings, key=lambda one: one.machine.rank))


@frozen(kw_only=True)
class Examined:
    """All that the checks judge."""

    ranks: tuple[Recording, ...] = field(converter=_sorted)
    """One recording a rank."""
    measured: Measured = field(factory=Measured)

    @cached_property
    def machines(self) -> tuple[Recording, ...]:
        """The recording of each machine: that of its first rank."""
        return tuple(self._by_machine.values())

    def machine_of(self, rank: int) -> Recording:
        """Return the recording of the machine that a rank is on."""
        return self._by_machine[_place(self.rank(rank))]

    def rank(self, number: int) -> Recording:
        """Return the recording of a rank."""
        return self._by_rank[number]

    @cached_property
    def _by_rank(self) -> dict[int, Recording]:
        return {one.machine.rank: one for one in self.ranks}

    @cached_property
    def _by_machine(self) -> dict[tuple[int, str], Recording]:
        found: dict[tuple[int, str], Recording] = {}
        for one in self.ranks:
            found.setdefault(_place(one), one)
        return found


def _place(one: Recording) -> tuple[int, str]:
    return one.machine.node, one.machine.host
