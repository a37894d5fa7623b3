"""Every backend against the truth in float64, in three dtypes."""

from collections.abc import Iterator

import torch

from accelerator.report import Report, reason_of
from ms_kernels.checking import Finding, check
from ms_kernels.operators import CONTRACTS

__all__ = ["prove"]


def prove(report: Report) -> None:
    """Check every backend in three dtypes, and note what does not hold."""
    report.table("dtype", "backend", "hold", "fail")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype in dtypes[:1] if report.small else dtypes:
        for backend in ("triton", "sdpa", "reference") if not report.small else ("cpu",):
            findings = [each for each in _each_operator(report, backend, dtype) if not each.reason]
            wrong = [each for each in findings if not each.holds]
            told = "; ".join(
                f"{each.operator} {each.options} {each.part}: {each.share:.3g}" for each in wrong
            )
            report.held &= not wrong
            name = str(dtype).removeprefix("torch.")
            report.row(name, backend, len(findings) - len(wrong), told or 0)


def _each_operator(report: Report, backend: str, dtype: torch.dtype) -> Iterator[Finding]:
    """Check operator by operator, so that one that fails to run does not hide the others."""
    for operator in CONTRACTS:
        try:
            yield from check([operator], [backend], device=report.device, dtype=dtype)
        except Exception as error:
            report.held = False
            report.row(dtype, backend, f"{operator} raised", reason_of(error))
