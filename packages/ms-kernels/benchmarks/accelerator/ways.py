"""Ways to do one operator: ours, torch.compile of the reference, and Liger's where it has one."""

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

__all__ = ["is_peer", "ours", "sizes_of", "ways_of"]

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
    "adamw_step": {"...": 2**28},
    "causal_conv1d": {"B": 4, "S": 4096, "C": 8192, "K": 4},
    "gated_delta_rule": {"B": 4, "S": 4096, "Hk": 16, "Hv": 32, "D": 128, "Dv": 128},
    "grouped_matmul": {"T": 16384, "E": 8, "K": 4096, "N": 14336},
    "quantized_linear": {"...": 16, "K": 4096, "P": 2048, "G": 128, "N": 14336},
    "decode_attention": {
        "B": 32, "Hq": 32, "Hk": 8, "D": 128, "P": 8192, "page": 16, "N": 256,
    },
}  # fmt: skip
"""Large shapes of the operators that memory or one product bounds."""

TINY = {"...": 3, "S": 3, "T": 4, "R": 8, "B": 1}
"""Rows in a dry run."""


def sizes_of(report: Report, operator: str) -> dict[str, int]:
    """Return the sizes to measure an operator at, where they differ from its example."""
    if not report.small:
        return SIZES.get(operator, {})
    return {name: size for name, size in TINY.items() if name in CONTRACTS[operator].example}


def ours(report: Report, operator: str) -> Iterator[Implementation]:
    """Yield the implementations whose times count as ours, best first.

    In a dry run Triton's kernels are interpreted, on the CPU.
    """
    for each in IMPLEMENTATIONS:
        if each.operator == operator and each.backend in ("sdpa", "triton", "cpu"):
            if report.small and each.backend == "triton":
                yield evolve(each, devices=frozenset({"cpu"}))
            elif report.small == (each.backend == "cpu"):
                yield each


def is_peer(name: str) -> bool:
    """Whether a way is somebody else's."""
    return name not in ("sdpa", "triton", "cpu") and not name.startswith("ms_kernels")


def ways_of(
    report: Report, operator: str, dtype: torch.dtype
) -> tuple[dict[str, Callable[..., Any]], tuple[Tensor | None, ...], Contract]:
    """Return ways to do one operator by name, the call's tensors and its contract."""
    contract = CONTRACTS[operator]
    drawn = contract.draw(sizes_of(report, operator), dtype=dtype, device=report.device)
    spare = [argument.name for argument in contract.arguments if argument.optional]
    inputs = tuple(None if name in spare else tensor for name, tensor in drawn.items())
    call = describe_call(contract, inputs, contract.defaults)
    ways = {
        each.backend: each.run for each in ours(report, operator) if not obstacle_to(each, call)
    }
    if not report.small and operator != "gated_delta_rule":  # which goes a token at a time
        ways["torch.compile"] = torch.compile(contract.reference, dynamic=False)
    ways |= dict(_liger(operator, inputs))
    return ways, inputs, contract


def _liger(
    operator: str, inputs: tuple[Tensor | None, ...]
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield Liger's way, where it is installed and has one, in our arguments."""
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

        # It writes the gradient into the logits, so it gets a copy; the copy's time is told too.
        yield (
            "Liger (writes into its input: with a copy)",
            lambda logits, targets, *rest: liger_cross_entropy(logits.clone(), targets),
        )
