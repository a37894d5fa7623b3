from .errors import ArgumentError, BackendError, KernelError, TableError
from .huggingface.attention import register_attention
from .huggingface.patch import PatchError, PatchReport, patch, unpatch
from .operators.add_rms_norm.operator import add_rms_norm
from .operators.attention.operator import attention
from .operators.causal_conv1d.operator import causal_conv1d
from .operators.cross_entropy.operator import cross_entropy
from .operators.decode_attention.operator import decode_attention
from .operators.gated_delta_rule.operator import gated_delta_rule
from .operators.geglu.operator import geglu
from .operators.grouped_matmul.operator import grouped_matmul
from .operators.layer_norm.operator import layer_norm
from .operators.linear_cross_entropy.operator import linear_cross_entropy
from .operators.permute_tokens.operator import permute_tokens
from .operators.rms_norm.operator import rms_norm
from .operators.rotary.operator import rotary
from .operators.swiglu.operator import swiglu
from .operators.token_log_probs.operator import token_log_probs
from .operators.unpermute_tokens.operator import unpermute_tokens
from .selection import explain, use_backend

__version__: str

__all__ = [
    "ArgumentError",
    "BackendError",
    "KernelError",
    "PatchError",
    "PatchReport",
    "TableError",
    "__version__",
    "add_rms_norm",
    "attention",
    "causal_conv1d",
    "cross_entropy",
    "decode_attention",
    "explain",
    "gated_delta_rule",
    "geglu",
    "grouped_matmul",
    "layer_norm",
    "linear_cross_entropy",
    "patch",
    "permute_tokens",
    "register_attention",
    "rms_norm",
    "rotary",
    "swiglu",
    "token_log_probs",
    "unpatch",
    "unpermute_tokens",
    "use_backend",
]
