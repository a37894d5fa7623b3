"""torch_npu's fused operators on Ascend, one adapter a family.

An adapter checks what the operator's own Meta kernel does not, brings layouts and dtypes to what
it takes, and brings a gradient where it has none. `torch.ops.npu` is looked up as a call is made:
to import this package costs nothing where torch_npu is absent, and no tensor is on a device of
type ``npu`` where it is.

Limits are those of CANN's documentation for Atlas A2 training chips (Ascend910B).
"""

from ms_kernels.ascend import (
    adamw_step,
    attention,
    cross_entropy,
    decode_attention,
    experts,
    gates,
    linear_cross_entropy,
    norms,
    quantized_linear,
    rotary,
)
from ms_kernels.registry import Implementation

__all__ = ["IMPLEMENTATIONS"]

FAMILIES = (
    norms,
    rotary,
    gates,
    attention,
    decode_attention,
    cross_entropy,
    linear_cross_entropy,
    experts,
    quantized_linear,
    adamw_step,
)

IMPLEMENTATIONS: tuple[Implementation, ...] = tuple(
    implementation for family in FAMILIES for implementation in family.IMPLEMENTATIONS
)
"""Every adapter."""
