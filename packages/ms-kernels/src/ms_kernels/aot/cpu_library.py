"""Makes the library of the CPU: a package of AOTInductor for each operator, and C that runs it."""

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
from ms_kernels.aot.workers import each_done
from ms_kernels.contracts.arguments import Model
from ms_kernels.contracts.call import describe
from ms_kernels.contracts.contract import Contract
from ms_kernels.errors import BackendError
from ms_kernels.operators import CONTRACTS


class _Operator(nn.Module):
    """An operator with its options fixed."""

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
    """Make the packages and the C library of the CPU in a folder; those that are there stay."""
    every = [name for name, each in CONTRACTS.items() if each.model is not None]
    chosen = [name for name in every if not only or name.startswith(tuple(only))]
    if not chosen:
        raise BackendError(
            f"no operator's name begins with {' or '.join(only)}; "
            f"for the CPU there are {', '.join(every)}"
        )
    kernels: list[Kernel] = []
    for made in each_done(partial(_make, work=work), chosen, jobs=jobs, least=2):
        kernels.append(made)
        progress(made.name, len(kernels), len(chosen))
    sources = resources.files("ms_kernels.aot")
    write(work / "ms_kernels.h", sources.joinpath("models.h").read_bytes())
    write(work / "models.c", sources.joinpath("models.c").read_bytes())
    flags = ["-shared", "-fPIC", "-fvisibility=hidden", "-O2", "-std=gnu11", "models.c"]
    run_compiler(flags, ["-o", LIBRARY, "-ldl"], work)
    packages = [f"{name}.{suffix}" for name in chosen for suffix in ("pt2", "so")]
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
    """Compile one operator, unless an earlier, stopped build did."""
    contract = CONTRACTS[name]
    model = contract.model
    assert model is not None
    drawn = contract.draw(model.sizes)
    tensors = {
        name: drawn[name]
        for name in (each.name for each in contract.arguments if not each.optional)
    }
    package, library = work / f"{name}.pt2", work / f"{name}.so"
    key, kept = _key(contract, model), work / f"{name}.key"
    if not _is_kept(kept, key, package, library):
        _compile(contract, model, tensors, package, library)
        kept.write_text(_sealed(key, package, library))
    return Kernel(
        name=name,
        dtype="fp32",
        parameters=[Parameter(name, describe(each.dtype)) for name, each in tensors.items()],
        tiles="",
        limits=dict.fromkeys(model.free, "any"),
        constants={each.name: str(each.default) for each in contract.options},
        registers=0,
        spilled_bytes=0,
        shared_bytes=0,
        matrix_instructions=0,
        vector_bits=0,
    )


def _is_kept(seal: Path, key: str, package: Path, library: Path) -> bool:
    """Return whether an earlier build left both files, whole and of the same sources."""
    try:
        return seal.read_text() == _sealed(key, package, library)
    except (OSError, UnicodeError):
        return False


def _sealed(key: str, package: Path, library: Path) -> str:
    """Return the key with the checksums of both files, so that a damaged one is compiled anew."""
    sums = (hashlib.sha256(each.read_bytes()).hexdigest() for each in (package, library))
    return " ".join((key, *sums))


def _key(contract: Contract, model: Model) -> str:
    """Return what a compiled operator depends on: sources, sizes, compiler, the kind of CPU."""
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
    shapes = tuple(
        {
            place: symbols.get("S" if name in ("Sq", "Sk") else name, Dim.STATIC)
            for place, name in enumerate(each.dims)
        }
        for each in contract.arguments
        if each.name in tensors
    )
    # Optional arguments stand between tensors and options, and are left out.
    spare = sum(each.optional for each in contract.arguments)
    operator = _Operator(contract.reference, (*(None,) * spare, *contract.defaults))
    with torch.no_grad():
        program = torch.export.export(
            operator, tuple(tensors.values()), dynamic_shapes=(shapes,), strict=False
        )
        aside = package.with_name(f"new-{package.name}")
        torch._inductor.aoti_compile_and_package(program, package_path=str(aside))
    with zipfile.ZipFile(aside) as archive:
        (inner,) = [
            name
            for name in archive.namelist()
            if name.endswith(".wrapper.so") or (name.endswith(".so") and "aotinductor" in name)
        ]
        write(library, archive.read(inner))
    aside.replace(package)
