"""Builds the CPU library: one AOTInductor package per operator, and C code that runs them."""

import hashlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from ms_kernels.aot.files import LIBRARY, file_of, own_version, run_compiler, write
from ms_kernels.aot.manifest import Kernel, Manifest, Parameter
from ms_kernels.aot.targets import Target
from ms_kernels.aot.workers import map_in_processes
from ms_kernels.contracts.arguments import Model
from ms_kernels.contracts.call import describe
from ms_kernels.contracts.contract import Contract
from ms_kernels.errors import BackendError
from ms_kernels.operators import CONTRACTS


class _Operator(nn.Module):
    """Operator with fixed options, as a module that can be exported."""

    def __init__(self, run: Callable[..., Any], options: tuple[Any, ...]) -> None:
        super().__init__()
        self._run, self._options = run, options

    def forward(self, *tensors: Tensor) -> Any:
        return self._run(*tensors, *self._options)


def make_models(
    target: Target,
    work: Path,
    only: Sequence[str],
    jobs: int,
    progress: Callable[[str, int, int], object],
) -> Manifest:
    """Build the CPU's packages and C library in `work`; reuse packages already in it."""
    available = [name for name, contract in CONTRACTS.items() if contract.model is not None]
    selected = [name for name in available if not only or name.startswith(tuple(only))]
    if not selected:
        raise BackendError(
            f"no operator's name starts with {' or '.join(only)}; "
            f"for the CPU there are {', '.join(available)}"
        )
    kernels: list[Kernel] = []
    for kernel in map_in_processes(partial(_make, work=work), selected, jobs=jobs, min_items=2):
        kernels.append(kernel)
        progress(kernel.name, len(kernels), len(selected))
    sources = resources.files("ms_kernels.aot")
    write(work / "ms_kernels.h", sources.joinpath("models.h").read_bytes())
    write(work / "models.c", sources.joinpath("models.c").read_bytes())
    flags = ["-shared", "-fPIC", "-fvisibility=hidden", "-O2", "-std=gnu11", "models.c"]
    run_compiler(flags, ["-o", LIBRARY, "-ldl"], work)
    packages = [f"{name}.{suffix}" for name in selected for suffix in ("pt2", "so")]
    return Manifest(
        target=target.name,
        library=LIBRARY,
        version=own_version(),
        compiler=f"torch {torch.__version__}",
        kernels=kernels,
        files=[file_of(work, name) for name in (LIBRARY, "ms_kernels.h", *packages)],
        kind="models",
    )


def _make(name: str, work: Path) -> Kernel:
    """Compile one operator, unless an interrupted build already did."""
    contract = CONTRACTS[name]
    model = contract.model
    assert model is not None
    example_tensors = contract.draw(model.sizes)
    tensors = {
        name: example_tensors[name]
        for name in (argument.name for argument in contract.arguments if not argument.optional)
    }
    package, library = work / f"{name}.pt2", work / f"{name}.so"
    key, seal = _key(contract, model), work / f"{name}.key"
    if not _is_kept(seal, key, package, library):
        _compile(contract, model, tensors, package, library)
        # Written last: after an interruption before this line, the operator is compiled again.
        seal.write_text(_sealed(key, package, library))
    return Kernel(
        name=name,
        dtype="fp32",
        parameters=[Parameter(name, describe(tensor.dtype)) for name, tensor in tensors.items()],
        tiles="",
        limits=dict.fromkeys(model.free, "any"),
        constants={option.name: str(option.default) for option in contract.options},
        registers=0,
        spilled_bytes=0,
        shared_bytes=0,
        matrix_instructions=0,
        vector_bits=0,
    )


def _is_kept(seal: Path, key: str, package: Path, library: Path) -> bool:
    """Return whether both files of an earlier build are intact and from the same sources."""
    try:
        return seal.read_text() == _sealed(key, package, library)
    except (OSError, UnicodeError):
        return False


def _sealed(key: str, package: Path, library: Path) -> str:
    """Return the key with the checksums of both files, so that a damaged file is recompiled."""
    sums = (hashlib.sha256(path.read_bytes()).hexdigest() for path in (package, library))
    return " ".join((key, *sums))


def _key(contract: Contract, model: Model) -> str:
    """Return a hash of a compiled operator's inputs: sources, sizes, compiler, CPU capability."""
    capability = torch.backends.cpu.get_cpu_capability()
    digest = hashlib.sha256(f"{contract.name} {model!r} {torch.__version__} {capability}".encode())
    for file in sorted(Path(str(resources.files("ms_kernels.operators"))).rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _compile(
    contract: Contract,
    model: Model,
    tensors: Mapping[str, Tensor],
    package: Path,
    library: Path,
) -> None:
    symbols = dict.fromkeys(model.free, Dim.AUTO)
    # `free` has S for both Sq and Sk, which are equal.
    shapes = tuple(
        {
            index: symbols.get("S" if name in ("Sq", "Sk") else name, Dim.STATIC)
            for index, name in enumerate(argument.dims)
        }
        for argument in contract.arguments
        if argument.name in tensors
    )
    # Optional arguments come between tensors and options; pass None for them.
    optional_count = sum(argument.optional for argument in contract.arguments)
    operator = _Operator(contract.reference, (*(None,) * optional_count, *contract.defaults))
    with torch.no_grad():
        program = torch.export.export(
            operator, tuple(tensors.values()), dynamic_shapes=(shapes,), strict=False
        )
        # Renamed at the end, so that an interrupted build leaves no partial package.
        temporary = package.with_name(f"new-{package.name}")
        torch._inductor.aoti_compile_and_package(program, package_path=str(temporary))
    with zipfile.ZipFile(temporary) as archive:
        (inner,) = [
            name
            for name in archive.namelist()
            if name.endswith(".wrapper.so") or (name.endswith(".so") and "aotinductor" in name)
        ]
        write(library, archive.read(inner))
    temporary.replace(package)
