"""The plan of a run: what is recorded, where it goes, and which of the processes this one is."""

import os
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from attrs import Attribute, field, frozen

from ms_profile.errors import CaptureError, number_in_environment
from ms_profile.files.untrusted import check_path
from ms_profile.log.manifest import TraceSchedule
from ms_profile.recording.trace_schedule import check_schedule
from ms_profile.version import __version__

LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
)


@frozen(kw_only=True)
class ProcessRank:
    """This process's rank among those of the run."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @classmethod
    def from_environment(cls) -> "ProcessRank":
        """Read what torchrun, Open MPI or Slurm set; rank 0 of 1 where none of them did."""
        for rank, local, size in LAUNCHERS:
            if rank in os.environ and size in os.environ:
                return cls(
                    rank=number_in_environment(rank, 0),
                    local_rank=number_in_environment(local, 0),
                    world_size=number_in_environment(size, 1),
                )
        return cls()


def _check(instance: object, attribute: "Attribute[Path]", value: Path) -> None:
    is_output = attribute.name == "output_dir"
    check_path(attribute.name, value, error=CaptureError, written="folder" if is_output else None)


def _absolute(folder: Path) -> Path:
    """Return the same folder after the script has changed the working directory."""
    return Path(os.path.abspath(folder)) if str(folder) else folder


@frozen(kw_only=True)
class Plan:
    """What to record, and where to put it."""

    script: Path = field(validator=_check)
    """The training script."""
    arguments: tuple[str, ...] = ()
    """Its arguments."""
    output_dir: Path = field(converter=_absolute, validator=_check)
    """A folder that holds no run yet."""
    metrics: tuple[str, ...]
    """Names of `METRICS`."""
    schedule: TraceSchedule = field(
        factory=TraceSchedule, validator=lambda _, __, value: check_schedule(value)
    )
    """Which steps are traced."""


def versions() -> dict[str, str]:
    """Return the versions that a run's manifest keeps."""
    found = {"python": sys.version.split()[0], "ms-profile": __version__}
    with suppress(PackageNotFoundError):
        found["torch"] = version("torch")
    return found


def clear_run(folder: Path, own: ProcessRank) -> None:
    """Remove what an earlier run left: this rank's files, and for rank 0 those of no rank now.

    Raises:
        CaptureError: the folder holds files but no run; it is not ours to clear.
    """
    if not folder.exists():
        return
    if any(folder.iterdir()) and not (folder / "manifest.json").exists() and own.rank == 0:
        raise CaptureError(f"{folder} holds no run; it is not cleared, choose another --output-dir")
    for path in folder.glob("*/rank-*"):
        rank = int(path.name[5:10]) if path.name[5:10].isdigit() else -1
        if rank == own.rank or (own.rank == 0 and rank >= own.world_size):
            path.unlink(missing_ok=True)
    if own.rank == 0:
        (folder / "manifest.json").unlink(missing_ok=True)
