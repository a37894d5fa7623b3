"""Lower the Triton kernels to Ascend's linalg with triton-ascend, as far as possible without CANN.

    python lower.py [TABLE]

Each operator runs forward and backward on the CPU with its launches recorded instead of executed;
then each launch is lowered. Prints a table of the results and compares it with the file TABLE, or
writes that file if the variable MS_WRITE_GOLDEN is set. The next step, bishengir-compile, is part
of CANN and would find kernels that exceed the chip's buffers.
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
"""Model sizes, for contracts whose example is smaller than a block."""

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
"""Triton launch options that Ascend's compiler does not use."""


def type_name(value):
    """Return Triton's name for the type of an argument."""
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


class RecordedKernel:
    """A fake kernel that records its launches."""

    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def __getitem__(self, grid):
        def record(*arguments, **constants):
            types = [type_name(arg) for arg in arguments]
            constexprs = {name: value for name, value in constants.items() if name not in OPTIONS}
            launch = {"kernel": self.name, "arguments": types, "constants": constexprs}
            if launch not in self.launches:
                self.launches.append(launch)

        return record


def launches_of(implementation):
    """Run an operator forward and backward in bfloat16, recording launches instead of executing."""
    contract = CONTRACTS[implementation.operator]
    launches = []
    launching.kernel = lambda name: RecordedKernel(name, launches)
    example = contract.draw(SIZES.get(contract.name, {}), dtype=torch.bfloat16)
    tensors = list(example.values())
    leaves = [
        tensor.requires_grad_()
        for argument, tensor in zip(contract.arguments, tensors, strict=True)
        if argument.differentiable
    ]
    outputs = implementation.run(*tensors, *(option.default for option in contract.options))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    differentiable = [output for output in outputs if output is not None and output.requires_grad]
    if leaves:
        torch.autograd.grad(
            differentiable, leaves, [torch.ones_like(output) for output in differentiable]
        )
    return launches


def lower(launch):
    """Return the kernel's text in Ascend's linalg."""
    module, _, name = launch["kernel"].rpartition(".")
    function = getattr(import_module(module), name)
    constants = dict(launch["constants"])
    parameters = [argument for argument in function.arg_names if argument not in constants]
    signature = dict(zip(parameters, launch["arguments"], strict=True))
    constants |= {
        argument: None for argument, type_name in signature.items() if type_name == "none"
    }
    signature = {
        argument: type_name for argument, type_name in signature.items() if type_name != "none"
    }
    source = ASTSource(function, signature, constants)
    backend = compiler.AscendBackend(TARGET)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    implementation = backend.get_codegen_implementation()
    module_ir = source.make_ir(options, implementation, backend.get_module_map(), context)
    metadata = {"target": TARGET, **options.__dict__}
    module_ir = compiler.make_ttir(module_ir, metadata, options)
    return compiler.ttir_to_linalg(module_ir, metadata, options, named_ops=True)


def verdict(launch):
    """Return the outcome of one launch, in one line."""
    try:
        text = lower(launch)
    except subprocess.CalledProcessError as error:
        return f"no: {reason((error.stderr or b'').decode())}"
    except Exception as error:  # any compiler error is the result
        return f"no: {reason(f'{type(error).__name__}: {error}')}"
    return f"yes, {text.count('linalg.matmul')} matrix products"


def reason(text):
    """Return the line with the error, without paths and addresses."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line or "Error(" in line]
    line = next(iter(errors or lines), "no message")
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
    """Print the table; exit with code 1 if it differs from the golden file."""
    text = "".join(f"{line}\n" for line in table())
    sys.stdout.write(text)
    for path in map(Path, sys.argv[1:]):
        if os.environ.get("MS_WRITE_GOLDEN"):
            path.write_text(text)
        if text != path.read_text():
            sys.exit(f"{path.name} differs; MS_WRITE_GOLDEN=1 nox -s ascend rewrites it")


if __name__ == "__main__":
    main()
