"""Lower the Triton kernels to Ascend's linalg through triton-ascend, as far as goes without CANN.

    python lower.py [TABLE]

Each operator runs forward and backward on the CPU, its launches noted instead of made; then each
is lowered. Prints a table: what a launch lowers to, or why it does not; and compares it with the
file TABLE, or writes it there if the variable MS_WRITE_GOLDEN is set. What comes after,
bishengir-compile, is part of CANN: it would find what the chip's buffers cannot hold.
"""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

os.environ |= {"TRITON_COMPILE_ONLY": "1", "TRITON_ASCEND_ARCH": "Ascend910B1"}

import torch
from triton._C.libtriton import ir
from triton.backends.ascend import compiler
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ms_kernels.backends.triton import launching
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS

SIZES = {
    "rms_norm": {"...": 16, "H": 4096},
    "add_rms_norm": {"...": 16, "H": 4096},
    "layer_norm": {"...": 16, "H": 4096},
    "rotary": {"B": 1, "S": 16, "Hq": 8, "Hk": 2, "D": 128, "R/2": 64},
    "swiglu": {"...": 16, "I": 4096},
    "geglu": {"...": 16, "I": 4096},
    "attention": {"B": 1, "Sq": 128, "Sk": 128, "Hq": 4, "Hk": 2, "D": 128, "Dv": 128},
    "decode_attention": {"B": 2, "Hq": 8, "Hk": 2, "D": 128, "P": 9, "page": 16, "N": 4},
    "cross_entropy": {"...": 16, "V": 8192},
    "linear_cross_entropy": {"...": 64, "H": 256, "V": 1024},
    "token_log_probs": {"...": 64, "H": 256, "V": 1024},
    "grouped_matmul": {"T": 128, "E": 4, "K": 256, "N": 256},
}
"""Sizes of models, where the contract's example is smaller than a block."""

NAMES = {
    torch.bfloat16: "bf16",
    torch.bool: "i1",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
OPTIONS = {"num_warps", "num_stages", "num_ctas", "enable_fp_fusion", "maxnreg"}
"""Launch options of Triton's, which Ascend's compiler has no use for."""


def kind(value):
    """Name the type of an argument as Triton does."""
    if value is None:
        return "none"
    if isinstance(value, torch.Tensor):
        return f"*{NAMES[value.dtype]}"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


TARGET = GPUTarget("npu", "Ascend910B1", 0)


class Noted:
    """Stands for a kernel, and notes how it is launched."""

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def __getitem__(self, grid):
        def note(*arguments, **constants):
            kinds = [kind(each) for each in arguments]
            kept = {name: value for name, value in constants.items() if name not in OPTIONS}
            launch = {"kernel": self.name, "arguments": kinds, "constants": kept}
            if launch not in self.notes:
                self.notes.append(launch)

        return note


def launches_of(implementation):
    """Run an operator both ways on tensors of bfloat16, the launches noted instead of made."""
    contract = CONTRACTS[implementation.operator]
    notes = []
    launching.kernel = lambda name: Noted(name, notes)
    drawn = contract.draw(SIZES.get(contract.name, {}), dtype=torch.bfloat16)
    tensors = list(drawn.values())
    leaves = [
        tensor.requires_grad_()
        for argument, tensor in zip(contract.arguments, tensors, strict=True)
        if argument.differentiable and not contract.mutates
    ]
    outputs = implementation.run(*tensors, *(option.default for option in contract.options))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pulled = [each for each in outputs if each is not None and each.requires_grad]
    if leaves:
        torch.autograd.grad(pulled, leaves, [torch.ones_like(each) for each in pulled])
    return notes


def lower(launch):
    """Return the kernel's text in Ascend's linalg."""
    module, _, name = launch["kernel"].rpartition(".")
    function = getattr(import_module(module), name)
    constants = dict(launch["constants"])
    places = [each for each in function.arg_names if each not in constants]
    signature = dict(zip(places, launch["arguments"], strict=True))
    constants |= {each: None for each, kind in signature.items() if kind == "none"}
    signature = {each: kind for each, kind in signature.items() if kind != "none"}
    source = ASTSource(function, signature, constants)
    backend = compiler.AscendBackend(TARGET)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    implementation = backend.get_codegen_implementation()
    made = source.make_ir(options, implementation, backend.get_module_map(), context)
    metadata = {"target": TARGET, **options.__dict__}
    made = compiler.make_ttir(made, metadata, options)
    return compiler.ttir_to_linalg(made, metadata, options, named_ops=True)


def verdict(launch):
    """Say what came of one launch, in one line."""
    try:
        text = lower(launch)
    except subprocess.CalledProcessError as error:
        return f"no: {reason((error.stderr or b'').decode())}"
    except Exception as error:  # whatever the compiler raises is the finding
        return f"no: {reason(f'{type(error).__name__}: {error}')}"
    return f"yes, {text.count('linalg.matmul')} matrix products"


def reason(text):
    """Return the line that says what is wrong, without paths and addresses."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = [line for line in lines if "error:" in line or "Error(" in line]
    line = next(iter(found or lines), "it says nothing")
    return re.sub(r"\S*/|0x[0-9a-f]+|:\d+:\d+", "", line).replace("|", "/")[:160]


def table():
    """Yield the lines of the table."""
    yield "| operator | kernel | lowers to linalg |"
    yield "|---|---|---|"
    for implementation in IMPLEMENTATIONS:
        ours = implementation.backend == "triton"
        for launch in launches_of(implementation) if ours else ():
            settings = ", ".join(f"{name}={value}" for name, value in launch["constants"].items())
            *_, folder, _, name = launch["kernel"].split(".")
            kernel = f"{folder}.{name} ({settings})"
            yield f"| {implementation.operator} | {kernel} | {verdict(launch)} |"


def main():
    """Print the table, and say with exit code 1 that it is not the one written down."""
    text = "".join(f"{line}\n" for line in table())
    sys.stdout.write(text)
    for path in map(Path, sys.argv[1:]):
        if os.environ.get("MS_WRITE_GOLDEN"):
            path.write_text(text)
        if text != path.read_text():
            sys.exit(f"{path.name} differs; MS_WRITE_GOLDEN=1 nox -s ascend writes it anew")


if __name__ == "__main__":
    main()
