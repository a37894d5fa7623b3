"""The output folder of a run: one manifest of the run, one of each rank, and the files they name.

```
OUTPUT/
  manifest.json                    RunManifest, written when the run starts
  ranks/rank-00000.json            RankManifest, rewritten as the rank goes on
  traces/rank-00000.000.json[.gz]  Kineto's JSON, one file a window
  events/rank-00000.000000.events  blocks of event records, rotated
  ring/rank-00000.ring             the recorder's memory-mapped ring
```
A rank that was killed leaves a manifest whose status is still "running"; everything it names is
there, for a name is written after its file.
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
Instant = Annotated[int, Meta(ge=0, le=1 << 62)]
LARGEST_MANIFEST_BYTES: Final = 1 << 26
T = TypeVar("T", bound=Struct)


class TraceSchedule(Struct, frozen=True, kw_only=True):
    """Which steps are traced: `windows` times `active` steps, the first after `skip` steps."""

    skip: int = 2
    """Steps left alone at the start: the first ones allocate, compile and fill caches."""
    warmup: int = 1
    """Steps on which the tracer runs and its records are thrown away, before each window."""
    active: int = 8
    """Steps recorded in a window."""
    windows: int = 2
    """How many windows are recorded; 0 means without end."""
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
    """What was run, and what was asked for."""

    world_size: Count
    metrics: tuple[str, ...]
    """Names asked for with `--metrics`, in the order of `ms_profile.metrics.METRICS`."""
    script: str
    arguments: tuple[str, ...] = ()
    """The arguments that the script got; the values of secrets are masked."""
    started_wall_ns: Instant
    schedule: TraceSchedule
    versions: dict[str, str]
    """The versions of ms-profile, python, and torch where known."""


class TraceFile(Struct, frozen=True, kw_only=True):
    """One window of one rank in Kineto's JSON."""

    path: str
    """Relative to the output folder."""
    first_step: Count
    steps: Count
    """Steps recorded; less than the window's when the script ended inside it."""
    size_bytes: Count
    complete: bool = True
    """False when the file could not be written whole (a full disk, for instance)."""


class RankManifest(Struct, frozen=True, kw_only=True, tag="ms-profile.rank.1", tag_field="format"):
    """One rank's process, and what it recorded."""

    rank: Rank
    local_rank: Rank
    world_size: Count
    host: str
    pid: Count
    device: str
    """`cpu`, `cuda`, `npu`: torch's accelerator as the process saw it, `cpu` where none."""
    status: Status
    """`running` after the end of the run means that the process was killed."""
    exit_code: int | None = None
    error: str | None = None
    """The last line of the script's traceback."""
    start: ClockPair
    end: ClockPair | None = None
    steps: Count = 0
    traces: tuple[TraceFile, ...] = ()
    complete: bool = True
    """False when something that was to be recorded was lost; `warnings` has what."""
    warnings: tuple[str, ...] = ()
    """What could not be recorded, one sentence each."""


def rank_path(folder: Path, rank: int) -> Path:
    """Return where a rank's manifest lies."""
    return folder / "ranks" / f"rank-{rank:05d}.json"


def trace_path(folder: Path, rank: int, window: int) -> Path:
    """Return where the trace of a rank's window lies, uncompressed."""
    return folder / "traces" / f"rank-{rank:05d}.{window:03d}.json"


def ring_path(folder: Path, rank: int) -> Path:
    """Return where a rank's ring lies."""
    return folder / "ring" / f"rank-{rank:05d}.ring"


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears under its name once it is written without an error.

    Raises:
        OSError: the disk is full or the folder cannot be written; what stood there before stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        aside.unlink(missing_ok=True)
        # "x": never through a link that somebody put under the predictable name.
        with aside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        aside.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all; see `whole_file`."""
    with whole_file(path) as file:
        file.write(content)


def encode(manifest: Struct) -> bytes:
    """Encode a manifest as indented JSON that ends in a newline."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def read_run(folder: Path) -> RunManifest:
    """Read a run's manifest.

    Raises:
        FormatError: there is none, or it is damaged or of another version.
    """
    return _read(folder / "manifest.json", RunManifest)


def read_ranks(folder: Path) -> list[RankManifest]:
    """Read the manifests of the ranks that reported, by rank.

    Raises:
        FormatError: one is damaged or of another version.
    """
    with decoding(folder, error=FormatError):
        paths = sorted((folder / "ranks").glob("rank-*.json"))
    return [_read(path, RankManifest) for path in paths]


def _read(path: Path, kind: type[T]) -> T:
    with decoding(path, error=FormatError):
        found = path.is_file()
    if not found:
        raise FormatError(
            f"{path.parent} has no {path.name}; give the --output-dir of an `ms-profile run`"
        )
    return read_json(path, kind, error=FormatError, limit_bytes=LARGEST_MANIFEST_BYTES)
