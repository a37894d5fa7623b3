"""Methods for one operator: ours, torch.compile of the reference, and Liger's where it has one."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from accelerator.report import Report
from ms_kernels.contracts.contract import Contract
from ms_kernels.core.choice import Implementation, obstacle_to
from ms_kernels.core.dispatch import describe_call
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS

__all__ = ["is_peer", "methods_of", "ours", "sizes_of"]

SIZES = {
    "rms_norm": {"...": 8192, "H": 4096},
    "add_rms_norm": {"...": 8192, "H": 4096},
    "layer_norm": {"...": 8192, "H": 4096},
    "rotary": {"B": 4, "S": 4096, "Hq": 32, "Hk": 8, "D": 128, "R/2": 64},
    "swiglu": {"...": 8192, "I": 14336},
    "geglu": {"...": 8192, "I": 14336},
    "cross_entropy": {"...": 8192, "V": 128256},
    "permute_tokens": {"T": 16384, "C": 2, "H": 4096},
    "unpermute_tokens": {"R": 32768, "T": 16384, "C": 2, "H": 4096},
    "causal_conv1d": {"B": 4, "S": 4096, "C": 8192, "K": 4},
    "gated_delta_rule": {"B": 4, "S": 4096, "Hk": 16, "Hv": 32, "D": 128, "Dv": 128},
    "grouped_matmul": {"T": 16384, "E": 8, "K": 4096, "N": 14336},
    "decode_attention": {
        "B": 32, "Hq": 32, "Hk": 8, "D": 128, "P": 8192, "page": 16, "N": 256,
    },
}  # fmt: skip
"""Large shapes for operators limited by memory or by a single product."""

TINY = {"...": 3, "S": 3, "T": 4, "R": 8, "B": 1}
"""Row counts for a dry run."""


def sizes_of(report: Report, operator: str) -> dict[str, int]:
    """Return the sizes at which to measure an operator, where they differ from its example."""
    if not report.small:
        return SIZES.get(operator, {})
    return {name: size for name, size in TINY.items() if name in CONTRACTS[operator].example}


def ours(report: Report, operator: str) -> Iterator[Implementation]:
    """Yield the implementations whose times count as ours, best first.

    In a dry run Triton's kernels are interpreted, on the CPU.
    """
    for impl in IMPLEMENTATIONS:
        if impl.operator == operator and impl.backend in ("sdpa", "triton", "cpu"):
            if report.small and impl.backend == "triton":
                yield evolve(impl, devices=frozenset({"cpu"}))
            elif report.small == (impl.backend == "cpu"):
                yield impl


def is_peer(name: str) -> bool:
    """Return whether a method is another library's."""
    return name not in ("sdpa", "triton", "cpu") and not name.startswith("ms_kernels")


def methods_of(
    report: Report, operator: str, dtype: torch.dtype
) -> tuple[dict[str, Callable[..., Any]], tuple[Tensor | None, ...], Contract]:
    """Return methods for one operator by name, the call's tensors and its contract."""
    contract = CONTRACTS[operator]
    example = contract.draw(sizes_of(report, operator), dtype=dtype, device=report.device)
    optional = [argument.name for argument in contract.arguments if argument.optional]
    inputs = tuple(None if name in optional else tensor for name, tensor in example.items())
    call = describe_call(contract, inputs, contract.defaults)
    methods = {
        impl.backend: impl.run for impl in ours(report, operator) if not obstacle_to(impl, call)
    }
    if not report.small and operator != "gated_delta_rule":  # its reference loops over tokens
        methods["torch.compile"] = torch.compile(contract.reference, dynamic=False)
    methods |= dict(_liger(operator, inputs))
    return methods, inputs, contract


def _liger(
    operator: str, inputs: tuple[Tensor | None, ...]
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield Liger's function with our arguments, if it is installed and has one."""
    if importlib.util.find_spec("liger_kernel") is None or inputs[0].device.type == "cpu":
        return
    if operator == "rms_norm":
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Function

        yield "Liger", lambda x, w, eps: Function.apply(x, w, eps, 0.0, "llama", False)
    elif operator == "layer_norm":
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction as Function

        zeros = torch.zeros_like(inputs[1])
        yield "Liger", lambda x, w, b, eps: Function.apply(x, w, zeros if b is None else b, eps)
    elif operator == "swiglu":
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction as Function

        yield "Liger", lambda gate, up: Function.apply(gate, up)
    elif operator == "geglu":
        from liger_kernel.ops.geglu import LigerGELUMulFunction as Function

        yield "Liger (tanh)", lambda gate, up, approximate: Function.apply(gate, up)
    elif operator == "cross_entropy":
        from liger_kernel.transformers.functional import liger_cross_entropy

        # It overwrites the logits with their gradient, so it gets a copy, whose time is included.
        yield (
            "Liger (overwrites its input: with a copy)",
            lambda logits, targets, *args: liger_cross_entropy(logits.clone(), targets),
        )
