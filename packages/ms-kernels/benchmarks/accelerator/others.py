"""Operators limited by matrix products, or by reading packed or paged memory."""

import torch

from accelerator.report import Report
from accelerator.ways import is_peer, methods_of
from ms_kernels.core.dispatch import describe_call
from ms_kernels.tuning.measure import one_pass

__all__ = ["measure"]

WITH_BACKWARD = ("grouped_matmul", "gated_delta_rule")
OPERATORS = ("decode_attention", *WITH_BACKWARD)


def measure(report: Report) -> None:
    """Time each operator; compiled references multiply by every expert or unpack all weights."""
    dtype = torch.float32 if report.small else torch.bfloat16
    report.table("operator", "pass", "method", "us", "GB/s", "TFLOP/s")
    for operator in OPERATORS:
        methods, inputs, contract = methods_of(report, operator, dtype)
        dims = contract.bind(describe_call(contract, inputs, contract.defaults))
        for pass_name, both in (("forward", False), ("forward and backward", True)):
            work = contract.forward(dims, dtype.itemsize)
            if both and operator not in WITH_BACKWARD:
                continue
            if both:
                backward = contract.backward(dims, dtype.itemsize)
                work = type(work)(
                    work.size_bytes + backward.size_bytes, work.flops + backward.flops
                )
            steps = {
                name: one_pass(contract, run, inputs, contract.defaults, backward=both)
                for name, run in methods.items()
            }
            seconds_of, failed = report.times(steps, may_fail=is_peer)
            for name, seconds in seconds_of.items():
                gigabytes, teraflops = work.size_bytes / 1e9, work.flops / 1e12
                rates = (f"{gigabytes / seconds:.0f}", f"{teraflops / seconds:.3g}")
                report.row(operator, pass_name, name, f"{1e6 * seconds:.1f}", *rates)
            for name, reason in failed.items():
                report.row(operator, pass_name, name, "failed", reason, "")
