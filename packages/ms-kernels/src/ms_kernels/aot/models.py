"""The library of the CPU: each operator a package of AOTInductor, and a C function that runs it."""

import hashlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.export import Dim

from ms_kernels.aot.manifest import Kernel, Manifest, Parameter
from ms_kernels.aot.targets import Target
from ms_kernels.aot.workers import each_done
from ms_kernels.contract import describe
from ms_kernels.errors import BackendError
from ms_kernels.reference import CONTRACTS

__all__ = ["MODELS", "Model", "make_models"]


@frozen(kw_only=True)
class Model:
    """One operator at one set of options, for some sizes or for any."""

    operator: str
    free: tuple[str, ...]
    """Symbols of the sizes that are not compiled in."""
    dims: Mapping[str, int] = field(factory=dict)
    """Sizes that are compiled in, where they differ from the contract's example."""
    options: Mapping[str, Any] = field(factory=dict)


MODELS = (
    Model(operator="rms_norm", free=("...", "H")),
    Model(operator="add_rms_norm", free=("...", "H")),
    Model(operator="layer_norm", free=("...", "H")),
    Model(operator="swiglu", free=("...", "I")),
    Model(operator="geglu", free=("...", "I")),
    Model(operator="rotary", free=("S",), dims={"Hq": 32, "Hk": 8, "D": 128, "R/2": 64}),
    Model(operator="attention", free=("S",), dims={"Hq": 32, "Hk": 8, "D": 128}),
    Model(operator="cross_entropy", free=("...", "V")),
    Model(operator="quantized_linear", free=("...", "N")),
)
"""What a CPU library holds, in float32."""


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
    progress: Callable[[str, int, int], None],
) -> Manifest:
    """Make the packages and the C library of the CPU in a folder; those that are there are kept."""
    from ms_kernels.aot.building import LIBRARY, file_of, own_version, run_compiler, write

    chosen = [each for each in MODELS if not only or each.operator.startswith(tuple(only))]
    if not chosen:
        there = ", ".join(each.operator for each in MODELS)
        raise BackendError(
            f"no operator's name begins with {' or '.join(only)}; for the CPU there are {there}"
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
    packages = [f"{each.operator}.{suffix}" for each in chosen for suffix in ("pt2", "so")]
    return Manifest(
        target=target.name,
        library=LIBRARY,
        version=own_version(),
        compiler=f"torch {torch.__version__}",
        kernels=kernels,
        files=[file_of(work, name) for name in (LIBRARY, "ms_kernels.h", *packages)],
        kind="models",
    )


def _make(model: Model, work: Path) -> Kernel:
    """Compile one operator, unless an earlier, stopped build did."""
    contract = CONTRACTS[model.operator]
    dims = {**contract.example, **model.dims}
    drawn = contract.draw(dims)
    tensors = {
        name: drawn[name]
        for name in (each.name for each in contract.arguments if not each.optional)
    }
    options = tuple(model.options.get(each.name, each.default) for each in contract.options)
    package, library = work / f"{model.operator}.pt2", work / f"{model.operator}.so"
    key, kept = _key(model), work / f"{model.operator}.key"
    if not _is_kept(kept, key, package, library):
        _compile(model, contract.arguments, tensors, options, package, library)
        kept.write_text(_sealed(key, package, library))
    return Kernel(
        name=model.operator,
        dtype="fp32",
        parameters=[Parameter(name, describe(each.dtype)) for name, each in tensors.items()],
        tiles="",
        limits=dict.fromkeys(model.free, "any"),
        constants={
            each.name: str(value) for each, value in zip(contract.options, options, strict=True)
        },
        registers=0,
        spilled_bytes=0,
        shared_bytes=0,
        matrix_instructions=0,
        vector_bits=0,
    )


def _is_kept(seal: Path, key: str, package: Path, library: Path) -> bool:
    """Whether an earlier build left both files, whole and of the same sources."""
    try:
        return seal.read_text() == _sealed(key, package, library)
    except (OSError, UnicodeError):
        return False


def _sealed(key: str, package: Path, library: Path) -> str:
    """Return the key with the checksums of both files, so that damage is compiled anew."""
    sums = (hashlib.sha256(each.read_bytes()).hexdigest() for each in (package, library))
    return " ".join((key, *sums))


def _key(model: Model) -> str:
    """Return what a compiled operator depends on: sources, sizes, compiler, the kind of CPU."""
    capability = torch.backends.cpu.get_cpu_capability()
    digest = hashlib.sha256(f"{model!r} {torch.__version__} {capability}".encode())
    for file in sorted(resources.files("ms_kernels.reference").iterdir(), key=str):
        if file.name.endswith(".py"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _compile(
    model: Model,
    arguments: Sequence[Any],
    tensors: Mapping[str, Tensor],
    options: tuple[Any, ...],
    package: Path,
    library: Path,
) -> None:
    symbols = dict.fromkeys(model.free, Dim.AUTO)
    shapes = tuple(
        {
            place: symbols.get("S" if name in ("Sq", "Sk") else name, Dim.STATIC)
            for place, name in enumerate(each.dims)
        }
        for each in arguments
        if each.name in tensors
    )
    contract = CONTRACTS[model.operator]
    # Optional arguments stand between tensors and options, and are left out.
    spare = sum(each.optional for each in contract.arguments)
    operator = _Operator(contract.reference, (*(None,) * spare, *options))
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
        library.with_suffix(".new").write_bytes(archive.read(inner))
    library.with_suffix(".new").replace(library)
    aside.replace(package)
