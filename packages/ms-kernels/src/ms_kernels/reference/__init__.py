"""The slow truth of every operator, in plain torch, float32 accumulated, for any device."""

from ms_kernels.contract import Contract
from ms_kernels.reference import (
    adamw_step,
    add_rms_norm,
    attention,
    cross_entropy,
    decode_attention,
    geglu,
    grouped_matmul,
    layer_norm,
    linear_cross_entropy,
    permute_tokens,
    quantized_linear,
    rms_norm,
    rotary,
    swiglu,
    token_log_probs,
    unpermute_tokens,
)
from ms_kernels.registry import Implementation

__all__ = ["CONTRACTS", "IMPLEMENTATIONS"]

CONTRACTS: dict[str, Contract] = {
    module.CONTRACT.name: module.CONTRACT
    for module in (
        rms_norm,
        add_rms_norm,
        layer_norm,
        rotary,
        swiglu,
        geglu,
        attention,
        decode_attention,
        cross_entropy,
        linear_cross_entropy,
        token_log_probs,
        permute_tokens,
        unpermute_tokens,
        grouped_matmul,
        quantized_linear,
        adamw_step,
    )
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
