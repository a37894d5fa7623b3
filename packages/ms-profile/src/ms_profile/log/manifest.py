"""Output folder of a run: manifests of the run and of each rank, and the files they list.

```
OUTPUT/
  manifest.json                    RunManifest, written when the run starts
  ranks/rank-00000.json            RankManifest, rewritten as the rank runs
  traces/rank-00000.000.json[.gz]  Kineto's JSON, one file per window
  events/rank-00000.000000.events  blocks of event records, rotated
  ring/rank-00000.ring             the recorder's memory-mapped ring
```
The manifest of a killed rank still has the status "running". All files that it lists exist, as a
file is listed after it is written.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from ms_profile.clocks.clock_pair import ClockPair
from ms_profile.errors import FormatError
from ms_profile.files.untrusted import decoding, read_json

Status = Literal["running", "done", "failed"]
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 24)]
WallTime = Annotated[int, Meta(ge=0, le=1 << 62)]
MAX_MANIFEST_BYTES: Final = 1 << 26
T = TypeVar("T", bound=Struct)


class TraceSchedule(Struct, frozen=True, kw_only=True):
    """Steps to trace: `windows` windows of `active` steps, the first after `skip` steps."""

    skip: int = 2
    """Steps to skip at the start, which allocate, compile and fill caches."""
    warmup: int = 1
    """Steps before each window on which the tracer runs but its records are discarded."""
    active: int = 8
    """Steps to record per window."""
    windows: int = 2
    """Number of windows; 0 for no limit."""
    every: int = 200
    """Steps from the start of one window to the start of the next."""


class RunManifest(
    Struct,
    frozen=True,
    kw_only=True,
    tag="ms-profile.run.1",
    tag_field="format",
    omit_defaults=True,
):
    """Script, arguments and settings of a run."""

    world_size: Count
    metrics: tuple[str, ...]
    """Value of `--metrics`, in the order of `ms_profile.metrics.METRICS`."""
    script: str
    arguments: tuple[str, ...] = ()
    """Arguments of the script, with secrets masked."""
    started_wall_ns: WallTime
    schedule: TraceSchedule
    versions: dict[str, str]
    """Versions of ms-profile, Python and, if installed, torch."""


class TraceFile(Struct, frozen=True, kw_only=True):
    """A trace of one window of one rank, in Kineto's JSON."""

    path: str
    """Path relative to the output folder."""
    first_step: Count
    steps: Count
    """Recorded steps; fewer than the window has if the script ended within it."""
    size_bytes: Count
    complete: bool = True
    """False if the file could not be written completely, for example on a full disk."""


class RankManifest(Struct, frozen=True, kw_only=True, tag="ms-profile.rank.1", tag_field="format"):
    """Process of one rank, and its recordings."""

    rank: Rank
    local_rank: Rank
    world_size: Count
    host: str
    pid: Count
    device: str
    """Type of torch's accelerator, such as `cuda` or `npu`; `cpu` without one."""
    status: Status
    """Status of the process; `running` after the end of the run means that it was killed."""
    exit_code: int | None = None
    error: str | None = None
    """Last line of the script's traceback."""
    start: ClockPair
    end: ClockPair | None = None
    steps: Count = 0
    traces: tuple[TraceFile, ...] = ()
    complete: bool = True
    """False if recordings were lost; see `warnings`."""
    warnings: tuple[str, ...] = ()
    """Problems in recording, one sentence each."""


def rank_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's manifest."""
    return folder / "ranks" / f"rank-{rank:05d}.json"


def trace_path(folder: Path, rank: int, window: int) -> Path:
    """Return the path of the uncompressed trace of a rank's window."""
    return folder / "traces" / f"rank-{rank:05d}.{window:03d}.json"


def ring_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's ring."""
    return folder / "ring" / f"rank-{rank:05d}.ring"


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that is renamed to `path` after it was written without an error.

    Raises:
        OSError: the disk is full or the folder is not writable; an existing file is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)
        # "x" never follows a symlink planted under the predictable name.
        with partial.open("xb") as file:
            yield file
            file.flush()
            # Before the rename, or a power cut could leave an empty file with the final name.
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        # Report the final path, as the temporary name means nothing to the user.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically; see `atomic_file`."""
    with atomic_file(path) as file:
        file.write(content)


def encode(manifest: Struct) -> bytes:
    """Encode a manifest as indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def read_run(folder: Path) -> RunManifest:
    """Read a run's manifest.

    Raises:
        FormatError: the manifest is missing, damaged, or of another version.
    """
    return _read(folder / "manifest.json", RunManifest)


def read_ranks(folder: Path) -> list[RankManifest]:
    """Read the manifests of all ranks that wrote one, by rank.

    Raises:
        FormatError: a manifest is damaged, or of another version.
    """
    with decoding(folder, error=FormatError):
        paths = sorted((folder / "ranks").glob("rank-*.json"))
    return [_read(path, RankManifest) for path in paths]


def _read(path: Path, struct: type[T]) -> T:
    with decoding(path, error=FormatError):
        exists = path.is_file()
    if not exists:
        raise FormatError(
            f"{path.parent} has no {path.name}; pass the --output-dir of an `ms-profile run`"
        )
    return read_json(path, struct, error=FormatError, limit_bytes=MAX_MANIFEST_BYTES)
