"""Compiles a kernel to a chip's machine code, and reports its resource usage."""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from attrs import frozen

from ms_kernels.aot.targets import Target
from ms_kernels.backends.triton.launching import kernel
from ms_kernels.core.entries import Entry
from ms_kernels.errors import BackendError


@frozen(kw_only=True)
class Resources:
    """Resource usage of a compiled kernel."""

    registers: int
    """Registers per thread."""
    spilled_bytes: int
    """Bytes of local memory per thread, used by register spills."""
    shared_bytes: int
    """Bytes of shared memory per program."""
    matrix_instructions: int
    """Number of Tensor Core or MFMA instructions."""
    vector_bits: int
    """Width of the widest global memory load or store."""


@frozen(kw_only=True)
class Compiled:
    """Machine code of one kernel, with its metadata."""

    entry: Entry
    binary: bytes
    """A cubin or hsaco."""
    symbol: str
    """Symbol of the kernel in the binary."""
    parameters: tuple[tuple[str, str], ...]
    """Name and type of the kernel's parameters, in order."""
    scratch: int
    """Number of scratch memory pointers after the parameters; always null."""
    resources: Resources
    ttir: str
    """Triton IR of the kernel, before it is lowered to the chip."""


def compiler_version() -> str:
    """Return Triton's version.

    Raises:
        BackendError: when it is not installed.
    """
    try:
        import triton
    except ImportError as error:
        remedy = "pip install 'ms-kernels[cuda]'"
        raise BackendError(f"building needs triton, which is not installed: {remedy}") from error
    return str(triton.__version__)


def own_arguments(entry: Entry) -> tuple[tuple[str, str], ...]:
    """Return name and type of the runtime arguments of a kernel."""
    signature = entry.signature(tuple(kernel(entry.kernel).arg_names))
    return tuple(pair for pair in signature.items() if pair[1] != "constexpr")


def compile_entry(entry: Entry, target: Target) -> Compiled:
    """Compile one kernel for a chip, which this machine need not have.

    Raises:
        BackendError: when Triton is not installed or cannot compile it.
    """
    compiler_version()
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = kernel(entry.kernel)
    signature = entry.signature(tuple(function.arg_names))
    # Triton vectorizes loads and stores of pointers and sizes that are divisible by 16.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(function.arg_names)
        if signature[name] != "constexpr" and entry.aligned(name)
    }
    source = ASTSource(
        fn=function, signature=signature, constexprs=dict(entry.constants), attrs=aligned
    )
    chip = GPUTarget(target.backend, target.architecture, target.lanes)
    options = {
        # A program has at most 1,024 threads.
        "num_warps": min(entry.warps, 1024 // target.lanes),
        "num_stages": entry.stages,
        "enable_fp_fusion": True,
    }
    try:
        compiled = triton.compile(source, target=chip, options=options)
    except Exception as error:  # Triton's errors have no common base class
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BackendError(f"{entry.name} does not compile for {target.name}: {reason}") from error
    binary = compiled.asm[target.suffix]
    return Compiled(
        entry=entry,
        binary=binary,
        symbol=str(compiled.metadata.name),
        parameters=own_arguments(entry),
        scratch=_scratch(compiled, target),
        resources=_nvidia_resources(compiled)
        if target.backend == "cuda"
        else _amd_resources(compiled),
        ttir=str(compiled.asm["ttir"]),
    )


def _scratch(kernel: Any, target: Target) -> int:
    """Count the scratch pointers that Triton appends to the parameters; their size must be 0."""
    for name in ("global_scratch_size", "profile_scratch_size"):
        size = getattr(kernel.metadata, name, 0)
        assert not size, f"{kernel.metadata.name} needs {size} bytes of scratch memory"
    if target.backend == "cuda":
        # Parameters that Triton added are in the assembly, but not in the signature.
        head = str(kernel.asm["ptx"]).partition(".entry")[2].partition(")")[0]
        return _count_scratch(head.count(".param"), kernel)
    kernels = str(kernel.asm["amdgcn"]).partition(".args:")[2].partition(".group_segment")[0]
    return _count_scratch(
        len(re.findall(r"\.value_kind: +(?:global_buffer|by_value)", kernels)), kernel
    )


def _count_scratch(count: int, kernel: Any) -> int:
    declared = sum(1 for dtype in kernel.src.signature.values() if dtype != "constexpr")
    assert count >= declared, f"{kernel.metadata.name} has {count} of {declared} parameters"
    return count - declared


def _nvidia_resources(kernel: Any) -> Resources:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage.stdout + usage.stderr)
    if match is None:
        raise BackendError(
            f"cuobjdump reports no resources of {kernel.metadata.name}: {usage.stderr[:200]}"
        )
    ptx = str(kernel.asm["ptx"])
    matrix = len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)", ptx))
    return Resources(
        registers=int(match[1]),
        # Registers spill to the stack and to local memory.
        spilled_bytes=int(match[2]) + int(match[3]),
        shared_bytes=int(kernel.metadata.shared),
        matrix_instructions=matrix,
        vector_bits=max(
            [0]
            + [
                int(lanes or 1) * int(bits)
                for lanes, bits in re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)
            ]
            + [8 * int(size) for size in re.findall(r"cp\.async\.\S+ [^;]*?, 0x(\d+)", ptx)]
        ),
    )


def _amd_resources(kernel: Any) -> Resources:
    code = str(kernel.asm["amdgcn"])

    def count(name: str) -> int:
        match = re.search(rf"\.{name}: +(\d+)", code)
        return int(match[1]) if match else 0

    widths = re.findall(r"(?:global|buffer|flat)_(?:load|store)_(?:dword|b)(x?\d*)\b", code)
    return Resources(
        registers=count("vgpr_count") + count("agpr_count"),
        spilled_bytes=4 * count("vgpr_spill_count"),
        shared_bytes=int(kernel.metadata.shared),
        matrix_instructions=len(re.findall(r"\bv_mfma_", code)),
        vector_bits=max([0] + [32 * int(width[1:] or 1) for width in widths]),
    )
