"""CPU implementations of the aclnn calls: one Python function per entry point.

A body's annotations are the C signature of its entry point (see `signatures`). Sums accumulate in
float32 and are rounded once, as CANN documents for its kernels; the order and rounding of the
real kernels may differ.
"""

from collections.abc import Callable

from . import (
    attention,
    elementwise,
    experts,
    foreach,
    indexing,
    losses,
    matrices,
    norms,
    optimizer,
    reductions,
    rotary,
)

__all__ = ["BODIES"]

BODIES: dict[str, Callable[..., None]] = {}
"""Bodies by name of the aclnn call."""
for _family in (
    attention,
    elementwise,
    experts,
    foreach,
    indexing,
    losses,
    matrices,
    norms,
    optimizer,
    reductions,
    rotary,
):
    assert not BODIES.keys() & _family.BODIES.keys()
    BODIES |= _family.BODIES
