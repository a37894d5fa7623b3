"""Fused operators with one typed face and many backends, each proved against a reference."""

from ms_kernels.dispatch import use_backend
from ms_kernels.errors import ArgumentError, BackendError, KernelError, TableError
from ms_kernels.explanation import explain
from ms_kernels.ops import (
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
from ms_kernels.rotary_angles import LinearScaling, Llama3Scaling, YarnScaling, rotary_table

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BackendError",
    "KernelError",
    "LinearScaling",
    "Llama3Scaling",
    "TableError",
    "YarnScaling",
    "__version__",
    "adamw_step",
    "add_rms_norm",
    "attention",
    "cross_entropy",
    "decode_attention",
    "explain",
    "geglu",
    "grouped_matmul",
    "layer_norm",
    "linear_cross_entropy",
    "permute_tokens",
    "quantized_linear",
    "rms_norm",
    "rotary",
    "rotary_table",
    "swiglu",
    "token_log_probs",
    "unpermute_tokens",
    "use_backend",
]
