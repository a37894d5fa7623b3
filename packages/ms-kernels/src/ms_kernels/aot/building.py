"""A library's folder, made whole: compiled piece by piece beside its place, then moved there."""

import hashlib
import logging
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module, resources
from pathlib import Path

import msgspec

from ms_kernels.aot.catalogue import Entry, entries
from ms_kernels.aot.compiling import Compiled, Facts, compile_entry, compiler_version, own_arguments
from ms_kernels.aot.lint import lint
from ms_kernels.aot.manifest import NAME, File, Manifest
from ms_kernels.aot.source import describe, header, table
from ms_kernels.aot.targets import Target, target_named
from ms_kernels.aot.workers import each_done
from ms_kernels.errors import BackendError, shown
from ms_kernels.files.untrusted import read_bytes, read_json

__all__ = ["LIBRARY", "Progress", "build", "file_of", "own_version", "run_compiler", "write"]

LIBRARY = "libms_kernels.so"

Progress = Callable[[str, int, int], None]
"""Takes what was done, how much of it, and how much there is."""

log = logging.getLogger(__name__)


def _silent(what: str, done: int, count: int) -> None:
    log.debug("%s: %d of %d", what, done, count)


def build(
    target: str,
    out: Path,
    *,
    only: Sequence[str] = (),
    jobs: int = 1,
    progress: Progress = _silent,
) -> Path:
    """Build the operator library of one chip, on a machine that need not have it.

    The folder ``out/TARGET`` appears whole or not at all. What was compiled lies beside it until
    then, so that a build that was stopped goes on where it was; a later build of what did not
    change takes it from Triton's own cache.

    Args:
        target: such as ``"sm_90"``; see `TARGETS`.
        out: the folder to make the target's folder in.
        only: kernels or operators whose names begin so; all if empty.
        jobs: processes to compile in, at most. With more than one, a script that calls this guards
            its top level by ``if __name__ == "__main__":``.
        progress: told after each piece.

    Returns:
        The target's folder: a shared library, its C header, a manifest.

    Raises:
        BackendError: when the target is unknown, its folder exists, or a tool is missing or fails.
    """
    chip = target_named(target)
    place = out / chip.name
    if jobs < 1:
        raise BackendError(f"jobs is {jobs}; it must be a number of processes, 1 or more")
    try:
        if place.exists():
            raise BackendError(f"{place} exists; remove it, or build into another folder")
        (out / f".{chip.name}.partial").mkdir(parents=True, exist_ok=True)
    except ValueError as error:  # a path that no system takes
        raise BackendError(f"{shown(str(place))}: {error}; name another folder") from error
    except OSError as error:
        raise _unwritten(place, error) from error
    try:
        return _made(chip, out, only, jobs, progress)
    except OSError as error:
        raise _unwritten(place, error) from error


def _unwritten(place: Path, error: OSError) -> BackendError:
    reason = error.strerror or type(error).__name__
    return BackendError(f"{shown(str(place))} cannot be written: {reason}; name another folder")


def _made(chip: Target, out: Path, only: Sequence[str], jobs: int, progress: Progress) -> Path:
    """Make a library beside its place, and move it there whole."""
    place, work = out / chip.name, out / f".{chip.name}.partial"
    if chip.backend == "cpu":
        from ms_kernels.aot.models import make_models

        manifest = make_models(chip, work, only, jobs, progress)
    else:
        manifest = _make_kernels(chip, work, only, jobs, progress)
    write(work / NAME, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    _keep_only(work, manifest)
    _sync(work)
    os.rename(work, place)
    _sync(out)
    return place


def _make_kernels(
    target: Target, work: Path, only: Sequence[str], jobs: int, progress: Progress
) -> Manifest:
    chosen = [each for each in entries(target.name) if _asked(each, only)]
    if not chosen:
        names = sorted({each.kernel.partition(".")[2] for each in entries(target.name)})
        raise BackendError(
            f"no kernel's name begins with {' or '.join(only)}; there are {', '.join(names)}"
        )
    compiled: list[Compiled] = []
    make = partial(_kept_or_compiled, target=target, work=work)
    for made in each_done(make, chosen, jobs=jobs, least=16):
        compiled.append(made)
        progress(made.entry.name, len(compiled), len(chosen))
    kernels = [describe(each) for each in compiled]
    write(work / "ms_kernels.h", header(target, kernels).encode())
    write(work / "table.c", table(compiled, kernels, target).encode())
    source = resources.files("ms_kernels.aot").joinpath("launcher.c").read_bytes()
    write(work / "launcher.c", source)
    _link(work, target)
    names = [LIBRARY, "ms_kernels.h", *(f"{each.name}.{target.suffix}" for each in kernels)]
    return Manifest(
        target=target.name,
        library=LIBRARY,
        version=own_version(),
        compiler=f"triton {compiler_version()}",
        kernels=kernels,
        files=[file_of(work, name) for name in names],
    )


def _asked(entry: Entry, only: Sequence[str]) -> bool:
    names = (entry.name, entry.kernel.partition(".")[0])
    return not only or any(name.startswith(tuple(only)) for name in names)


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a stopped build left of one kernel, beside its binary."""

    key: str
    sha256: str
    symbol: str
    scratch: int
    facts: dict[str, int]


def _kept_or_compiled(entry: Entry, target: Target, work: Path) -> Compiled:
    """Take a kernel from an earlier, stopped build of the same source, or compile it."""
    key = _key(entry)
    facts_path = work / f"{entry.name}.json"
    binary_path = work / f"{entry.name}.{target.suffix}"
    try:
        kept = read_json(facts_path, _Kept, error=BackendError)
        binary = read_bytes(binary_path, error=BackendError)
        if kept.key == key and kept.sha256 == hashlib.sha256(binary).hexdigest():
            return Compiled(
                entry=entry,
                binary=binary,
                symbol=kept.symbol,
                parameters=own_arguments(entry),
                scratch=kept.scratch,
                facts=Facts(**kept.facts),
                ttir="",
            )
    except (BackendError, TypeError) as error:  # none yet, or damaged: no reason to stop
        log.debug("%s is compiled anew: %s", entry.name, error)
    made = compile_entry(entry, target)
    faults = lint(made.ttir, entry.greatest())
    if faults:
        raise BackendError(f"{entry.name}: {faults[0]}")
    write(binary_path, made.binary)
    facts = {name: getattr(made.facts, name) for name in Facts.__annotations__}
    sha256 = hashlib.sha256(made.binary).hexdigest()
    kept = _Kept(key=key, sha256=sha256, symbol=made.symbol, scratch=made.scratch, facts=facts)
    write(facts_path, msgspec.json.encode(kept))
    return made


def _key(entry: Entry) -> str:
    """Return what a compiled kernel depends on: sources, sizes, compiler."""
    digest = hashlib.sha256(f"{entry!r} {compiler_version()} {own_version()}".encode())
    for file in sorted(resources.files("ms_kernels.triton.kernels").iterdir(), key=str):
        if file.name.endswith(".py"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _link(work: Path, target: Target) -> None:
    """Make the shared library with the machine's C compiler."""
    flags = [f"-DMS_CAPABILITY={target.architecture}"] if target.backend == "cuda" else ["-DMS_HIP"]
    run_compiler(
        ["-shared", "-fPIC", "-fvisibility=hidden", "-O2", "-std=gnu11", *flags, "launcher.c"],
        ["-o", LIBRARY, "-ldl", "-lpthread"],
        work,
    )


def run_compiler(
    arguments: Sequence[str], output: Sequence[str], work: Path, variable: str = "CC"
) -> None:
    """Run the machine's C compiler in a folder.

    Raises:
        BackendError: when there is none, or it fails; gives its first error.
    """
    default = {"CC": "cc", "CXX": "c++"}[variable]
    command = (os.environ.get(variable) or default).split()
    if shutil.which(command[0]) is None:
        known = sysconfig.get_config_var(variable)
        remedy = f"install one, or set {variable} (Python was built with {known})"
        raise BackendError(f"there is no compiler {command[0]!r}; {remedy}")
    ended = subprocess.run(
        [*command, *arguments, *output], cwd=work, capture_output=True, text=True
    )
    if ended.returncode:
        errors = [line for line in ended.stderr.splitlines() if "error" in line]
        reason = (errors or ended.stderr.splitlines() or ["no message"])[0]
        raise BackendError(f"{command[0]} failed: {reason}")


def file_of(folder: Path, name: str) -> File:
    """Describe a file of a library."""
    content = (folder / name).read_bytes()
    return File(name, len(content), hashlib.sha256(content).hexdigest())


def own_version() -> str:
    """Return the version of this package."""
    return str(import_module("ms_kernels").__version__)


def write(path: Path, content: bytes) -> None:
    """Write a file so that it is whole after any stop."""
    aside = path.with_name(path.name + ".new")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def _keep_only(work: Path, manifest: Manifest) -> None:
    """Remove what the manifest does not list."""
    listed = {NAME, *(each.path for each in manifest.files)}
    for path in work.iterdir():
        if path.name not in listed:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
