from .dispatch import use_backend
from .errors import ArgumentError, BackendError, KernelError, TableError
from .explanation import explain
from .ops import (
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
from .rotary_angles import LinearScaling, Llama3Scaling, YarnScaling, rotary_table

__version__: str

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
