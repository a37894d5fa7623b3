"""torch's own operators on the CPU, arranged where that is faster or leaner than the reference."""

import torch

from ms_kernels.contract import Call
from ms_kernels.cpu import (
    attention,
    cross_entropy,
    linear_cross_entropy,
    rms_norm,
    rotary,
    swiglu,
)
from ms_kernels.registry import Implementation

__all__ = ["IMPLEMENTATIONS"]

CPU = frozenset({"cpu"})

SMALL = 2**15
"""Elements below which Python's share of the time outweighs what is saved."""


def _small_or_traced(call: Call) -> str | None:
    """Decline where the reference is faster: on little data, and under inductor."""
    if call.compiling:
        return "torch.compile fuses the reference by itself"
    assert call.facts[0] is not None
    elements = 1
    for size in call.facts[0].shape:
        elements *= size
    if elements < SMALL:
        return f"pays from {SMALL} elements on, and here are {elements}"
    return None


IMPLEMENTATIONS = (
    Implementation(
        operator="rms_norm",
        backend="cpu",
        run=rms_norm.rms_norm,
        devices=CPU,
        refuses=_small_or_traced,
        merit="blocks of rows in the cache; saves x and one number a row",
    ),
    Implementation(
        operator="rotary",
        backend="cpu",
        run=rotary.rotary,
        devices=CPU,
        dtypes=(torch.float32, torch.float64),
        refuses=_small_or_traced,
        merit="writes into the result, no temporaries; saves only the angles",
    ),
    Implementation(
        operator="swiglu",
        backend="cpu",
        run=swiglu.swiglu,
        devices=CPU,
        refuses=_small_or_traced,
        merit="blocks of rows in the cache; saves only gate and up",
    ),
    Implementation(
        operator="attention",
        backend="cpu",
        run=attention.attention,
        devices=CPU,
        refuses=attention.refuses,
        merit="torch's fused kernel, which never holds the scores",
    ),
    Implementation(
        operator="cross_entropy",
        backend="cpu",
        run=cross_entropy.cross_entropy,
        devices=CPU,
        refuses=_small_or_traced,
        merit="blocks of rows in the cache; saves one number a row besides the logits",
    ),
    Implementation(
        operator="linear_cross_entropy",
        backend="cpu",
        run=linear_cross_entropy.linear_cross_entropy,
        devices=CPU,
        refuses=_small_or_traced,
        merit="does no work for ignored rows",
    ),
)
