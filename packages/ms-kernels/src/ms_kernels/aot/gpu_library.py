"""Builds a GPU library: kernels compiled by Triton, embedded in C code that launches them."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import msgspec
from attrs import asdict

from ms_kernels.aot.compiling import (
    Compiled,
    Resources,
    compile_entry,
    compiler_version,
    own_arguments,
)
from ms_kernels.aot.files import LIBRARY, file_of, own_version, run_compiler, write
from ms_kernels.aot.lint import lint
from ms_kernels.aot.manifest import Manifest
from ms_kernels.aot.source import describe, header, table
from ms_kernels.aot.targets import Target
from ms_kernels.aot.workers import map_in_processes
from ms_kernels.core.entries import DTYPES, Entry
from ms_kernels.errors import BackendError
from ms_kernels.files.untrusted import read_bytes, read_json
from ms_kernels.operators import IMPLEMENTATIONS

log = logging.getLogger(__name__)


def entries(chip: str) -> tuple[Entry, ...]:
    """Return the kernels of a library for `chip`, grouped by dtype and operator."""
    return tuple(
        entry
        for dtype in DTYPES
        for implementation in IMPLEMENTATIONS
        for entry in implementation.entries(chip, dtype)
    )


def make_kernels(
    target: Target,
    work: Path,
    only: Sequence[str],
    jobs: int,
    progress: Callable[[str, int, int], object],
) -> Manifest:
    """Compile a GPU's kernels and link its library in `work`, which may hold earlier kernels."""
    available = entries(target.name)
    selected = [entry for entry in available if _is_selected(entry, only)]
    if not selected:
        names = sorted({entry.kernel.rpartition(".")[2] for entry in available})
        raise BackendError(
            f"no kernel's name starts with {' or '.join(only)}; there are {', '.join(names)}"
        )
    compiled: list[Compiled] = []
    compile_one = partial(_cached_or_compiled, target=target, work=work)
    for kernel in map_in_processes(compile_one, selected, jobs=jobs, min_items=16):
        compiled.append(kernel)
        progress(kernel.entry.name, len(compiled), len(selected))
    kernels = [describe(kernel) for kernel in compiled]
    write(work / "ms_kernels.h", header(target, kernels).encode())
    write(work / "table.c", table(compiled, kernels, target).encode())
    source = resources.files("ms_kernels.aot").joinpath("launcher.c").read_bytes()
    write(work / "launcher.c", source)
    _link(work, target)
    names = [LIBRARY, "ms_kernels.h", *(f"{kernel.name}.{target.suffix}" for kernel in kernels)]
    return Manifest(
        target=target.name,
        library=LIBRARY,
        version=own_version(),
        compiler=f"triton {compiler_version()}",
        kernels=kernels,
        files=[file_of(work, name) for name in names],
    )


def _is_selected(entry: Entry, only: Sequence[str]) -> bool:
    names = (entry.name, entry.operator)
    return not only or any(name.startswith(tuple(only)) for name in names)


class _CachedKernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metadata of a kernel from an interrupted build, stored next to its binary."""

    key: str
    sha256: str
    symbol: str
    scratch: int
    resources: dict[str, int]


def _cached_or_compiled(entry: Entry, target: Target, work: Path) -> Compiled:
    """Reuse a kernel from an interrupted build of the same source, or compile it."""
    key = _key(entry)
    metadata_path = work / f"{entry.name}.json"
    binary_path = work / f"{entry.name}.{target.suffix}"
    try:
        metadata = read_json(metadata_path, _CachedKernel, error=BackendError)
        binary = read_bytes(binary_path, error=BackendError)
        if metadata.key == key and metadata.sha256 == hashlib.sha256(binary).hexdigest():
            return Compiled(
                entry=entry,
                binary=binary,
                symbol=metadata.symbol,
                parameters=own_arguments(entry),
                scratch=metadata.scratch,
                resources=Resources(**metadata.resources),
                ttir="",  # checked when it was compiled
            )
    except (BackendError, TypeError) as error:  # missing or damaged: compile it
        log.debug("recompiling %s: %s", entry.name, error)
    compiled = compile_entry(entry, target)
    faults = lint(compiled.ttir, entry.argument_limits())
    if faults:
        raise BackendError(f"{entry.name}: {faults[0]}")
    # The metadata is written last, with the binary's checksum: if the build is interrupted between
    # the two writes, the kernel is compiled again.
    write(binary_path, compiled.binary)
    metadata = _CachedKernel(
        key=key,
        sha256=hashlib.sha256(compiled.binary).hexdigest(),
        symbol=compiled.symbol,
        scratch=compiled.scratch,
        resources=asdict(compiled.resources),
    )
    write(metadata_path, msgspec.json.encode(metadata))
    return compiled


def _key(entry: Entry) -> str:
    """Return a hash of a compiled kernel's inputs: source, sizes, compiler."""
    digest = hashlib.sha256(f"{entry!r} {compiler_version()} {own_version()}".encode())
    source = find_spec(entry.kernel.rpartition(".")[0])
    assert source is not None
    assert source.origin is not None
    digest.update(Path(source.origin).read_bytes())
    return digest.hexdigest()


def _link(work: Path, target: Target) -> None:
    """Link the shared library with the machine's C compiler."""
    flags = [f"-DMS_CAPABILITY={target.architecture}"] if target.backend == "cuda" else ["-DMS_HIP"]
    run_compiler(
        ["-shared", "-fPIC", "-fvisibility=hidden", "-O2", "-std=gnu11", *flags, "launcher.c"],
        ["-o", LIBRARY, "-ldl", "-lpthread"],
        work,
    )
