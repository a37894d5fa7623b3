"""Measured rates of a copy and a matrix product, as upper bounds for this device."""

import torch
from attrs import frozen

from accelerator.report import Report

__all__ = ["Ceilings", "measure"]


@frozen(kw_only=True)
class Ceilings:
    """Measured rates of this device."""

    copy_rate: float
    """Bytes read and written per second."""
    product_rate: float
    """FLOP per second of a bfloat16 product."""


def measure(report: Report) -> Ceilings:
    """Measure a copy and a bfloat16 product."""
    size = 2**16 if report.small else 2**31
    side = 64 if report.small else 8192
    block = torch.empty(size, dtype=torch.uint8, device=report.device)
    target = torch.empty_like(block)
    square = torch.randn(side, side, device=report.device, dtype=torch.bfloat16)
    methods = {"copy": lambda: target.copy_(block), "product": lambda: square @ square}
    seconds_of, _ = report.times(methods)
    ceilings = Ceilings(
        copy_rate=2 * size / seconds_of["copy"], product_rate=2 * side**3 / seconds_of["product"]
    )
    report.add(
        "",
        f"Copy {ceilings.copy_rate / 1e9:.0f} GB/s; "
        f"bfloat16 product {ceilings.product_rate / 1e12:.3g} TFLOP/s.",
    )
    return ceilings
