"""Memory-bound operators, relative to the rate of a copy."""

import torch

from accelerator.ceilings import Ceilings
from accelerator.report import Report, reason_of
from accelerator.ways import is_peer, methods_of
from ms_kernels.core.dispatch import describe_call
from ms_kernels.tuning.measure import one_pass

__all__ = ["measure"]

OPERATORS = (
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "rotary",
    "swiglu",
    "geglu",
    "cross_entropy",
    "permute_tokens",
    "unpermute_tokens",
    "causal_conv1d",
)


def measure(report: Report, ceilings: Ceilings) -> None:
    """Time each operator, forward and with gradients."""
    report.table("operator", "pass", "method", "us", "GB/s", "of copy", "times torch.compile")
    for operator in OPERATORS:
        try:
            _measure(report, operator, ceilings)
        except Exception as error:
            report.passed = False
            report.row(operator, "", "failed", reason_of(error), "", "", "")


def _measure(report: Report, operator: str, ceilings: Ceilings) -> None:
    dtype = torch.float32 if report.small else torch.bfloat16
    methods, inputs, contract = methods_of(report, operator, dtype)
    dims = contract.bind(describe_call(contract, inputs, contract.defaults))
    forward = contract.forward(dims, dtype.itemsize)
    backward = contract.backward(dims, dtype.itemsize)
    for pass_name, both in (("forward", False), ("forward and backward", True)):
        if both and not backward.size_bytes:
            continue
        steps = {
            name: one_pass(contract, run, inputs, contract.defaults, backward=both)
            for name, run in methods.items()
        }
        seconds_of, failed = report.times(steps, spend_s=0.15, may_fail=is_peer)
        size = forward.size_bytes + (backward.size_bytes if both else 0)
        for name, seconds in seconds_of.items():
            rate, compiled = size / seconds, seconds_of.get("torch.compile", float("nan")) / seconds
            share = f"{rate / ceilings.copy_rate:.0%}"
            cells = (f"{1e6 * seconds:.1f}", f"{rate / 1e9:.0f}", share, f"{compiled:.2f}")
            report.row(operator, pass_name, name, *cells)
        for name, reason in failed.items():
            report.row(operator, pass_name, name, "failed", reason, "", "")
