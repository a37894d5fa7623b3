"""Builds a library folder: compiled piece by piece in a temporary folder, then renamed."""

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ms_kernels.aot.cpu_library import make_models
from ms_kernels.aot.files import write
from ms_kernels.aot.gpu_library import make_kernels
from ms_kernels.aot.manifest import NAME, Manifest
from ms_kernels.aot.targets import Target, target_named
from ms_kernels.errors import BackendError, shown

Progress = Callable[[str, int, int], object]
"""Callback with the name of a compiled piece, the number of pieces done, and the total."""

log = logging.getLogger(__name__)


def _silent(piece: str, done: int, count: int) -> None:
    log.debug("%s: %d of %d", piece, done, count)


def build(
    target: str,
    out: Path,
    *,
    only: Sequence[str] = (),
    jobs: int = 1,
    progress: Progress = _silent,
) -> Path:
    """Build the operator library of one chip, which need not be installed.

    The folder ``out/TARGET`` is renamed into place when it is complete. Until then, compiled pieces
    are in ``out/.TARGET.partial``, from which an interrupted build resumes. Later builds reuse
    unchanged kernels from Triton's cache.

    Args:
        target: name of the chip, such as ``"sm_90"``; see `TARGETS`.
        out: parent of the target's folder.
        only: name prefixes of the kernels or operators to build; all if empty.
        jobs: maximum number of compiler processes. With more than one, a calling script must guard
            its top level with ``if __name__ == "__main__":``.
        progress: called after each piece with its name, the number of pieces done, and the total.

    Returns:
        The target's folder, with a shared library, its C header and a manifest.

    Raises:
        BackendError: the target is unknown, its folder exists, or a tool is missing or fails.
    """
    chip = target_named(target)
    folder = out / chip.name
    if jobs < 1:
        raise BackendError(f"jobs must be at least 1, got {jobs}")
    try:
        if folder.exists():
            raise BackendError(f"{folder} exists; remove it, or build into another folder")
        (out / f".{chip.name}.partial").mkdir(parents=True, exist_ok=True)
    except ValueError as error:  # invalid on every system, such as a null byte
        raise BackendError(f"{shown(str(folder))}: {error}; use another folder") from error
    except OSError as error:
        raise _write_error(folder, error) from error
    try:
        return _build(chip, out, only, jobs, progress)
    except OSError as error:
        raise _write_error(folder, error) from error


def _write_error(path: Path, error: OSError) -> BackendError:
    reason = error.strerror or type(error).__name__
    return BackendError(f"{shown(str(path))} cannot be written: {reason}; use another folder")


def _build(chip: Target, out: Path, only: Sequence[str], jobs: int, progress: Progress) -> Path:
    """Build a library in the temporary folder, then rename it to its final name atomically."""
    folder, work = out / chip.name, out / f".{chip.name}.partial"
    build_content = make_models if chip.backend == "cpu" else make_kernels
    manifest = build_content(chip, work, only, jobs, progress)
    write(work / NAME, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    _keep_only(work, manifest)
    # Sync first: after a crash, the final name never has an incomplete folder.
    _sync(work)
    os.rename(work, folder)
    _sync(out)
    return folder


def _keep_only(work: Path, manifest: Manifest) -> None:
    """Remove all files that the manifest does not list."""
    listed = {NAME, *(file.path for file in manifest.files)}
    for path in work.iterdir():
        if path.name not in listed:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
