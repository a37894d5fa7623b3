"""Model operators in plain torch; the module itself implements `Ops`."""

from ms_parallel.operators.experts import grouped_matmul, permute_tokens, unpermute_tokens
from ms_parallel.operators.losses import cross_entropy, linear_cross_entropy
from ms_parallel.operators.plain import attention, geglu, rms_norm, rotary, swiglu
from ms_parallel.operators.protocol import Ops
from ms_parallel.operators.recurrent import causal_conv1d, gated_delta_rule

__all__ = [
    "Ops",
    "attention",
    "causal_conv1d",
    "cross_entropy",
    "gated_delta_rule",
    "geglu",
    "grouped_matmul",
    "linear_cross_entropy",
    "permute_tokens",
    "rms_norm",
    "rotary",
    "swiglu",
    "unpermute_tokens",
]
