"""Which traces of a folder are read, one a rank, and which run they belong to."""

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
    """The files to read."""

    files: tuple[Path, ...]
    """By name."""
    warnings: tuple[str, ...] = ()
    """What of the folder cannot be used, one sentence each."""


@frozen(kw_only=True)
class RunDescription:
    """What was run, as its folder's manifests record it."""

    name: str
    """Name of the folder or file."""
    command: str = ""
    """The script and its arguments, as a shell takes them; empty where not known."""
    started_wall_ns: int | None = None
    metrics: tuple[str, ...] | None = None
    """Asked for with `--metrics`; None where not known, so that all are shown."""
    steps: int | None = None
    """Steps of the whole run, those of the longest rank."""
    windows: int = 1
    """How many windows of a rank were saved, the most of any."""
    window: int = 1
    """Which of them is analysed, counted from 1."""
    versions: dict[str, str] = field(factory=dict)


def find_traces(path: Path, *, window: int | None = None) -> FoundTraces:
    """Find the traces to read; in a run's folder, those that its ranks' manifests name.

    Args:
        path: a trace, a ring, a folder of either, or the output folder of `ms-profile run`.
        window: which window of each rank, counted from 1; the last one where not given.

    Raises:
        TraceError: there are none.
    """
    if path.is_file():
        return FoundTraces(files=(path,))
    if not path.exists():
        raise TraceError(f"there is no {path}; give a trace, or a folder of .json or .json.gz")
    ranks, warnings = _ranks_of(path)
    named = [_named(path, rank, window) for rank in ranks]
    # Unlike `Path.is_file`, this takes a name that no system would.
    found = [file for file in named if file is not None and os.path.isfile(file)]
    if window is not None and ranks and not found:
        raise TraceError(
            f"{path} has no window {window}; it has {max(len(rank.traces) for rank in ranks)}"
        )
    is_run = (path / "manifest.json").is_file()
    if not found and not is_run:
        found = sorted(file for file in path.glob("*") if file.name.lower().endswith(SUFFIXES))
    if not found and any((path / "traces").glob("*")):  # of ranks that could not report
        inner = find_traces(path / "traces")
        return FoundTraces(files=_last_windows(inner.files), warnings=tuple(warnings))
    if not found and is_run:
        raise TraceError(
            f"the run in {path} saved no window of traced steps: it was too short, or killed; its "
            f"steps are in `ms-profile logs {path}`, its last spans in `ms-profile report "
            f"{path}/ring`"
        )
    if not found:
        found = sorted(file for file in path.glob("*") if file.suffix.lower() == RING_SUFFIX)
    if not found:
        globs = [vendor.trace_files for vendor in VENDORS if vendor.trace_files]
        found = sorted(file for each in globs for file in path.glob(each))
    if not found:
        raise TraceError(
            f"{path} has no traces; give a trace, or a folder of .json, .json.gz or .ring"
        )
    return FoundTraces(files=tuple(found), warnings=tuple(warnings))


def _ranks_of(path: Path) -> tuple[list[RankManifest], list[str]]:
    """Return the manifests of a run's ranks, and what is wrong with those that cannot be read."""
    try:
        return read_ranks(path), []
    except ProfileError as error:
        return [], [str(error)]


def _named(folder: Path, rank: RankManifest, window: int | None) -> Path | None:
    """Return the trace that a rank names; nothing outside of the run's folder is read for it."""
    if not rank.traces or (window is not None and not 0 < window <= len(rank.traces)):
        return None
    path = PurePosixPath(rank.traces[-1 if window is None else window - 1].path)
    if path.is_absolute() or ".." in path.parts or "\0" in str(path):
        return None
    return folder / path


def _last_windows(files: Sequence[Path]) -> tuple[Path, ...]:
    """Return the last of each rank's windows (`rank-00000.003.json`)."""
    last = {file.name.split(".")[0]: file for file in files}
    return tuple(last.values())


def describe_run(
    path: Path,
    *,
    window: int | None = None,
    on_problem: Callable[[str], None] = logger.warning,
) -> RunDescription:
    """Describe what was run, from the manifests of a run's folder, or of the one a file lies in.

    Args:
        path: the folder or file.
        window: of the run, counted from 1; the last one where not given.
        on_problem: called with a sentence on a run's manifest that cannot be read.
    """
    place = Path(os.path.abspath(path))
    folder = next(
        (each for each in (place, *place.parents[:2]) if (each / "manifest.json").is_file()), None
    )
    if folder is None:
        return RunDescription(name=place.name)
    try:
        run = read_run(folder)
    except ProfileError as error:
        on_problem(f"{error}; what was run, and what it was to show, is not known")
        return RunDescription(name=place.name)
    ranks, _ = _ranks_of(folder)
    saved = max((len(rank.traces) for rank in ranks), default=0) if place == folder else 1
    return RunDescription(
        name=folder.name if place == folder else f"{folder.name}/{place.relative_to(folder)}",
        command=shlex.join((run.script, *mask_arguments(run.arguments))),
        started_wall_ns=run.started_wall_ns,
        metrics=run.metrics,
        steps=max((rank.steps for rank in ranks), default=None),
        windows=max(saved, 1),
        window=saved if window is None else window,
        versions=run.versions,
    )


def latest_of_each(claims: Sequence[tuple[int, Path, int]]) -> tuple[set[Path], list[str]]:
    """Decide which file stands for a rank that several files claim: the one that begins last.

    Args:
        claims: rank, file and first instant in ns of every trace.

    Returns:
        The files that are left out, and a sentence for each.
    """
    by_rank: dict[int, list[tuple[int, Path]]] = defaultdict(list)
    for rank, file, start_ns in claims:
        by_rank[rank].append((start_ns, file))
    left_out: set[Path] = set()
    warnings = []
    for rank, files in sorted(by_rank.items()):
        *earlier, (_, kept) = sorted(files)
        for _, file in earlier:
            left_out.add(file)
            warnings.append(
                f"{file.name} and {kept.name} are both of rank {rank}: {file.name}, which begins "
                "earlier, is left out"
            )
    return left_out, warnings
