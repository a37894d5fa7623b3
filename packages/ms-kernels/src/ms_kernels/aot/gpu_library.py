"""Makes the library of a GPU: kernels compiled by Triton, embedded in C that launches them."""

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
from ms_kernels.aot.workers import each_done
from ms_kernels.core.entries import DTYPES, Entry
from ms_kernels.errors import BackendError
from ms_kernels.files.untrusted import read_bytes, read_json
from ms_kernels.operators import IMPLEMENTATIONS

log = logging.getLogger(__name__)


def entries(chip: str) -> tuple[Entry, ...]:
    """Return the kernels that a library for `chip` holds, operator by operator."""
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
    """Compile the kernels of a GPU and link its library in a folder; those that are there stay."""
    every = entries(target.name)
    chosen = [each for each in every if _asked(each, only)]
    if not chosen:
        names = sorted({each.kernel.rpartition(".")[2] for each in every})
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
    names = (entry.name, entry.operator)
    return not only or any(name.startswith(tuple(only)) for name in names)


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a stopped build left of one kernel, beside its binary."""

    key: str
    sha256: str
    symbol: str
    scratch: int
    resources: dict[str, int]


def _kept_or_compiled(entry: Entry, target: Target, work: Path) -> Compiled:
    """Take a kernel from an earlier, stopped build of the same source, or compile it."""
    key = _key(entry)
    kept_path = work / f"{entry.name}.json"
    binary_path = work / f"{entry.name}.{target.suffix}"
    try:
        kept = read_json(kept_path, _Kept, error=BackendError)
        binary = read_bytes(binary_path, error=BackendError)
        if kept.key == key and kept.sha256 == hashlib.sha256(binary).hexdigest():
            return Compiled(
                entry=entry,
                binary=binary,
                symbol=kept.symbol,
                parameters=own_arguments(entry),
                scratch=kept.scratch,
                resources=Resources(**kept.resources),
                ttir="",
            )
    except (BackendError, TypeError) as error:  # none yet, or damaged: no reason to stop
        log.debug("%s is compiled anew: %s", entry.name, error)
    made = compile_entry(entry, target)
    faults = lint(made.ttir, entry.greatest())
    if faults:
        raise BackendError(f"{entry.name}: {faults[0]}")
    write(binary_path, made.binary)
    kept = _Kept(
        key=key,
        sha256=hashlib.sha256(made.binary).hexdigest(),
        symbol=made.symbol,
        scratch=made.scratch,
        resources=asdict(made.resources),
    )
    write(kept_path, msgspec.json.encode(kept))
    return made


def _key(entry: Entry) -> str:
    """Return what a compiled kernel depends on: its source, sizes, compiler."""
    digest = hashlib.sha256(f"{entry!r} {compiler_version()} {own_version()}".encode())
    source = find_spec(entry.kernel.rpartition(".")[0])
    assert source is not None
    assert source.origin is not None
    digest.update(Path(source.origin).read_bytes())
    return digest.hexdigest()


def _link(work: Path, target: Target) -> None:
    """Make the shared library with the machine's C compiler."""
    flags = [f"-DMS_CAPABILITY={target.architecture}"] if target.backend == "cuda" else ["-DMS_HIP"]
    run_compiler(
        ["-shared", "-fPIC", "-fvisibility=hidden", "-O2", "-std=gnu11", *flags, "launcher.c"],
        ["-o", LIBRARY, "-ldl", "-lpthread"],
        work,
    )
