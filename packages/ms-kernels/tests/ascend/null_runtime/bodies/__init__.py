"""What each aclnn call computes, on the CPU: one Python function an entry point.

A body's annotations are the C signature of its entry point (see `signatures`). Sums are kept in
float32 and rounded once, as CANN documents for its kernels; order and rounding of the real ones
may differ.
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
"""By name of the aclnn call."""
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
