"""Every backend against float64 truth, in three dtypes."""

from collections.abc import Iterator

import torch

from accelerator.report import Report, reason_of
from ms_kernels.checking import Finding, check
from ms_kernels.operators import CONTRACTS

__all__ = ["prove"]


def prove(report: Report) -> None:
    """Check every backend in three dtypes, and report failures."""
    report.table("dtype", "backend", "hold", "fail")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype in dtypes[:1] if report.small else dtypes:
        for backend in ("triton", "sdpa", "reference") if not report.small else ("cpu",):
            findings = [
                finding
                for finding in _check_operators(report, backend, dtype)
                if not finding.reason
            ]
            wrong = [finding for finding in findings if not finding.holds]
            failures = "; ".join(
                f"{finding.operator} {finding.options} {finding.part}: {finding.share:.3g}"
                for finding in wrong
            )
            report.passed &= not wrong
            name = str(dtype).removeprefix("torch.")
            report.row(name, backend, len(findings) - len(wrong), failures or 0)


def _check_operators(report: Report, backend: str, dtype: torch.dtype) -> Iterator[Finding]:
    """Check operator by operator, so that an error in one does not hide the others."""
    for operator in CONTRACTS:
        try:
            yield from check([operator], [backend], device=report.device, dtype=dtype)
        except Exception as error:
            report.passed = False
            report.row(dtype, backend, f"{operator} raised", reason_of(error))
