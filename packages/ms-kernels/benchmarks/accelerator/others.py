"""What is bound by products, or by reading packed or paged memory."""

import torch

from accelerator.report import Report
from accelerator.ways import is_peer, ways_of
from ms_kernels.core.dispatch import describe_call
from ms_kernels.tuning.measure import one_pass

__all__ = ["measure"]

TRAINED = ("grouped_matmul", "gated_delta_rule")
OPERATORS = ("decode_attention", "quantized_linear", *TRAINED)


def measure(report: Report) -> None:
    """Time each; a compiled reference multiplies every expert, or unpacks all of the weight."""
    dtype = torch.float32 if report.small else torch.bfloat16
    report.table("operator", "pass", "way", "us", "GB/s", "TFLOP/s")
    for operator in OPERATORS:
        ways, inputs, contract = ways_of(report, operator, dtype)
        dims = contract.bind(describe_call(contract, inputs, contract.defaults))
        for told, both in (("forward", False), ("forward and backward", True)):
            work = contract.forward(dims, dtype.itemsize)
            if both and operator not in TRAINED:
                continue
            if both:
                more = contract.backward(dims, dtype.itemsize)
                work = type(work)(work.size_bytes + more.size_bytes, work.flops + more.flops)
            steps = {
                name: one_pass(contract, run, inputs, contract.defaults, backward=both)
                for name, run in ways.items()
            }
            took, failed = report.times(steps, may_fail=is_peer)
            for name, seconds in took.items():
                gigabytes, teraflops = work.size_bytes / 1e9, work.flops / 1e12
                rates = (f"{gigabytes / seconds:.0f}", f"{teraflops / seconds:.3g}")
                report.row(operator, told, name, f"{1e6 * seconds:.1f}", *rates)
            for name, reason in failed.items():
                report.row(operator, told, name, "failed", reason, "")
