"""Find the traces to analyze, one per rank, and the run that they belong to."""

import logging
import os
import shlex
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from attrs import field, frozen

from ms_profile.errors import ProfileError, TraceError
from ms_profile.log.manifest import RankManifest, read_ranks, read_run
from ms_profile.secret_text import mask_arguments
from ms_profile.vendors import VENDORS

logger = logging.getLogger(__name__)
SUFFIXES: Final = (".json", ".json.gz")
RING_SUFFIX: Final = ".ring"


@frozen(kw_only=True)
class FoundTraces:
    """Trace files of a folder."""

    files: tuple[Path, ...]
    """Paths, sorted by name."""
    warnings: tuple[str, ...] = ()
    """One sentence per part of the folder that cannot be used."""


@frozen(kw_only=True)
class RunDescription:
    """Description of a run, from the manifests in its folder."""

    name: str
    """Name of the folder or file."""
    command: str = ""
    """Script and arguments as a shell command; empty if unknown."""
    started_wall_ns: int | None = None
    metrics: tuple[str, ...] | None = None
    """Value of `--metrics`. None: unknown, so all metrics are shown."""
    steps: int | None = None
    """Number of steps of the run, the maximum over ranks."""
    windows: int = 1
    """Number of saved windows, the maximum over ranks."""
    window: int = 1
    """Window that is analyzed, counted from 1."""
    versions: dict[str, str] = field(factory=dict)


def find_traces(path: Path, *, window: int | None = None) -> FoundTraces:
    """Find the trace files to read; in a run's folder, the manifests of the ranks name them.

    Args:
        path: a trace, a ring file, a folder of either, or the output folder of `ms-profile run`.
        window: window of each rank, counted from 1. None: the last one.

    Raises:
        TraceError: the path has no traces.
    """
    if path.is_file():
        return FoundTraces(files=(path,))
    if not path.exists():
        raise TraceError(
            f"{path} does not exist; pass a trace, or a folder of .json or .json.gz files"
        )
    # First match counts: traces named by manifests, traces in the folder, windows without a
    # manifest, rings, and the folder layouts of vendors.
    ranks, warnings = _ranks_of(path)
    paths = [_trace_path(path, rank, window) for rank in ranks]
    # Unlike `Path.is_file`, this returns False for names that are too long.
    files = [file for file in paths if file is not None and os.path.isfile(file)]
    if window is not None and ranks and not files:
        raise TraceError(
            f"{path} has no window {window}; it has {max(len(rank.traces) for rank in ranks)}"
        )
    is_run = (path / "manifest.json").is_file()
    if not files and not is_run:
        files = sorted(file for file in path.glob("*") if file.name.lower().endswith(SUFFIXES))
    if not files and any((path / "traces").glob("*")):  # no rank could write a manifest
        inner = find_traces(path / "traces")
        return FoundTraces(files=_last_windows(inner.files), warnings=tuple(warnings))
    if not files and is_run:
        raise TraceError(
            f"the run in {path} saved no window of traced steps: it was too short, or was killed; "
            f"see its steps with `ms-profile logs {path}` and its last spans with `ms-profile "
            f"report {path}/ring`"
        )
    if not files:
        files = sorted(file for file in path.glob("*") if file.suffix.lower() == RING_SUFFIX)
    if not files:
        globs = [pattern for vendor in VENDORS for pattern in vendor.trace_files]
        files = next(filter(None, (sorted(path.glob(pattern)) for pattern in globs)), [])
    if not files:
        raise TraceError(
            f"{path} has no traces; pass a trace, or a folder of .json, .json.gz, .sqlite, .db or "
            ".ring files"
        )
    return FoundTraces(files=tuple(files), warnings=tuple(warnings))


def _ranks_of(path: Path) -> tuple[list[RankManifest], list[str]]:
    """Return the manifests of a run's ranks, and a warning if they cannot be read."""
    try:
        return read_ranks(path), []
    except ProfileError as error:
        return [], [str(error)]


def _trace_path(folder: Path, rank: RankManifest, window: int | None) -> Path | None:
    """Return the path of a rank's trace; paths outside the run's folder are ignored."""
    if not rank.traces or (window is not None and not 0 < window <= len(rank.traces)):
        return None
    path = PurePosixPath(rank.traces[-1 if window is None else window - 1].path)
    if path.is_absolute() or ".." in path.parts or "\0" in str(path):
        return None
    return folder / path


def _last_windows(files: Sequence[Path]) -> tuple[Path, ...]:
    """Return the last window of each rank (`rank-00000.003.json`)."""
    # Files are sorted by name, so a later window replaces an earlier one.
    last = {file.name.split(".")[0]: file for file in files}
    return tuple(last.values())


def describe_run(
    path: Path,
    *,
    window: int | None = None,
    on_problem: Callable[[str], None] = logger.warning,
) -> RunDescription:
    """Describe a run from the manifests in its folder, or in the folder of one of its files.

    Args:
        path: folder or file of the run.
        window: window of the run, counted from 1. None: the last one.
        on_problem: called with a sentence if a manifest cannot be read.
    """
    resolved = Path(os.path.abspath(path))
    folder = next(
        (
            parent
            # The run's folder itself, or the folder of OUTPUT/traces/FILE.
            for parent in (resolved, *resolved.parents[:2])
            if (parent / "manifest.json").is_file()
        ),
        None,
    )
    if folder is None:
        return RunDescription(name=resolved.name)
    try:
        run = read_run(folder)
    except ProfileError as error:
        on_problem(f"{error}; the run's command and metrics are unknown")
        return RunDescription(name=resolved.name)
    ranks, _ = _ranks_of(folder)
    saved = max((len(rank.traces) for rank in ranks), default=0) if resolved == folder else 1
    return RunDescription(
        name=folder.name if resolved == folder else f"{folder.name}/{resolved.relative_to(folder)}",
        command=shlex.join((run.script, *mask_arguments(run.arguments))),
        started_wall_ns=run.started_wall_ns,
        metrics=run.metrics,
        steps=max((rank.steps for rank in ranks), default=None),
        windows=max(saved, 1),
        window=saved if window is None else window,
        versions=run.versions,
    )


def latest_of_each(claims: Sequence[tuple[int, Path, int]]) -> tuple[set[Path], list[str]]:
    """For ranks with several trace files, keep the file that starts last.

    Args:
        claims: rank, file and start time in ns of every trace.

    Returns:
        The files to ignore, and a warning for each.
    """
    by_rank: dict[int, list[tuple[int, Path]]] = defaultdict(list)
    for rank, file, start_ns in claims:
        by_rank[rank].append((start_ns, file))
    ignored: set[Path] = set()
    warnings = []
    for rank, files in sorted(by_rank.items()):
        *earlier, (_, latest) = sorted(files)
        for _, file in earlier:
            ignored.add(file)
            warnings.append(
                f"{file.name} and {latest.name} are both from rank {rank}; {file.name} starts "
                "earlier and is ignored"
            )
    return ignored, warnings
