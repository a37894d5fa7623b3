"""What the device was seen to do: a copy and a product, which nothing can be faster than."""

import torch
from attrs import frozen

from accelerator.report import Report

__all__ = ["Ceilings", "measure"]


@frozen(kw_only=True)
class Ceilings:
    """Rates of this device."""

    copy_rate: float
    """Bytes read and written a second."""
    product_rate: float
    """FLOP a second of a bfloat16 product."""


def measure(report: Report) -> Ceilings:
    """Measure a copy and a bfloat16 product."""
    size = 2**16 if report.small else 2**31
    side = 64 if report.small else 8192
    block = torch.empty(size, dtype=torch.uint8, device=report.device)
    target = torch.empty_like(block)
    square = torch.randn(side, side, device=report.device, dtype=torch.bfloat16)
    ways = {"copy": lambda: target.copy_(block), "product": lambda: square @ square}
    took, _ = report.times(ways)
    found = Ceilings(copy_rate=2 * size / took["copy"], product_rate=2 * side**3 / took["product"])
    report.add(
        "",
        f"Copy {found.copy_rate / 1e9:.0f} GB/s; "
        f"bfloat16 product {found.product_rate / 1e12:.3g} TFLOP/s.",
    )
    return found
