"""The plan of a run (script, metrics, schedule, output folder) and this process's rank in it."""

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

# torchrun, Open MPI, Slurm: torchrun first, as it may run inside a Slurm job.
LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
)


@frozen(kw_only=True)
class ProcessRank:
    """Rank of this process, its rank on the host, and the number of processes in the run."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @classmethod
    def from_environment(cls) -> "ProcessRank":
        """Read the variables of torchrun, Open MPI or Slurm; rank 0 of 1 if none are set."""
        for rank_name, local_rank_name, world_size_name in LAUNCHERS:
            if rank_name in os.environ and world_size_name in os.environ:
                return cls(
                    rank=number_in_environment(rank_name, 0),
                    local_rank=number_in_environment(local_rank_name, 0),
                    world_size=number_in_environment(world_size_name, 1),
                )
        return cls()


def _check(instance: object, attribute: "Attribute[Path]", value: Path) -> None:
    is_output = attribute.name == "output_dir"
    check_path(attribute.name, value, error=CaptureError, written="folder" if is_output else None)


def _absolute(folder: Path) -> Path:
    """Resolve the folder now, as the script may change the working directory."""
    return Path(os.path.abspath(folder)) if str(folder) else folder


@frozen(kw_only=True)
class Plan:
    """Script to run, data to record, and output folder."""

    script: Path = field(validator=_check)
    """Training script."""
    arguments: tuple[str, ...] = ()
    """Arguments for the script."""
    output_dir: Path = field(converter=_absolute, validator=_check)
    """Output folder; must not contain a run yet."""
    metrics: tuple[str, ...]
    """Metric names from `METRICS`."""
    schedule: TraceSchedule = field(
        factory=TraceSchedule, validator=lambda _, __, value: check_schedule(value)
    )
    """Steps to trace."""


def versions() -> dict[str, str]:
    """Return the versions to store in a run's manifest."""
    by_package = {"python": sys.version.split()[0], "ms-profile": __version__}
    with suppress(PackageNotFoundError):
        by_package["torch"] = version("torch")
    return by_package


def clear_run(folder: Path, process: ProcessRank) -> None:
    """Remove this rank's files of an earlier run; rank 0 also removes files of ranks now absent.

    Raises:
        CaptureError: the folder has files but no run, so it must not be cleared.
    """
    if not folder.exists():
        return
    if any(folder.iterdir()) and not (folder / "manifest.json").exists() and process.rank == 0:
        raise CaptureError(
            f"{folder} has files but no run, so --overwrite does not clear it; choose another "
            "--output-dir"
        )
    for path in folder.glob("*/rank-*"):
        rank = int(path.name[5:10]) if path.name[5:10].isdigit() else -1  # rank-00000.*
        if rank == process.rank or (process.rank == 0 and rank >= process.world_size):
            path.unlink(missing_ok=True)
    # Removed last: if this is interrupted, the folder can still be recognized as a run's.
    if process.rank == 0:
        (folder / "manifest.json").unlink(missing_ok=True)
