"""The slow truth of every operator, in plain torch, float32 accumulated, for any device."""

from ms_kernels.contract import Contract
from ms_kernels.reference import (
    attention,
    cross_entropy,
    linear_cross_entropy,
    rms_norm,
    rotary,
    swiglu,
)
from ms_kernels.registry import Implementation

__all__ = ["CONTRACTS", "IMPLEMENTATIONS"]

CONTRACTS: dict[str, Contract] = {
    module.CONTRACT.name: module.CONTRACT
    for module in (rms_norm, rotary, swiglu, attention, cross_entropy, linear_cross_entropy)
}
"""Every operator by name."""

IMPLEMENTATIONS = tuple(
    Implementation(
        operator=contract.name,
        backend="reference",
        run=contract.reference,
        subclasses=True,
        merit="plain torch, runs on every device and dtype",
    )
    for contract in CONTRACTS.values()
)
