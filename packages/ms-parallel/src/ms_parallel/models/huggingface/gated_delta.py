"""Gated delta networks of transformers on packed rows, all documents at once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ms_parallel.operators.cpu import widen
from ms_parallel.operators.protocol import Ops

REQUIRED_ATTRIBUTES = (
    "A_log",
    "conv1d",
    "dt_bias",
    "head_k_dim",
    "head_v_dim",
    "key_dim",
    "norm",
    "out_proj",
)


def is_delta(module: Any) -> bool:
    """Whether a module is a gated delta network in one of the two supported forms.

    Qwen3.5 has separate projections for qkv, gate, rate and decay. Qwen3-Next fuses them into two,
    and a method of the module reorders their outputs.
    """
    has_separate = all(hasattr(module, f"in_proj_{suffix}") for suffix in ("qkv", "z", "b", "a"))
    has_fused = hasattr(module, "in_proj_qkvz") and hasattr(module, "fix_query_key_value_ordering")
    has_all = all(hasattr(module, name) for name in REQUIRED_ATTRIBUTES)
    return has_all and (has_separate or has_fused) and getattr(module, "activation", None) == "silu"


def delta_forward(module: Any, hidden: Tensor, documents: Tensor | None, ops: Ops) -> Tensor:
    """Map (B, S, H) to (B, S, H); no state crosses `documents`, (B, S) int32."""
    mixed, z, b, a = _projected(module, hidden)  # (B, S, channels), gate, rate, decay
    weight = module.conv1d.weight.squeeze(1)
    mixed = ops.causal_conv1d(mixed, weight, module.conv1d.bias, documents=documents, silu=True)
    q, k, v = torch.split(mixed, [module.key_dim, module.key_dim, module.value_dim], -1)
    q, k, v = (  # (B, S, heads, D)
        x.reshape(*hidden.shape[:2], -1, width)
        for x, width in ((q, module.head_k_dim), (k, module.head_k_dim), (v, module.head_v_dim))
    )
    # Log decay per position and head (B, S, heads), always negative: -exp(A) · softplus(a + dt).
    g = -widen(module.A_log).exp() * F.softplus(widen(a) + module.dt_bias)
    out = ops.gated_delta_rule(q, k, v, g, b.sigmoid(), documents=documents, normalize=True)
    # (B, S, heads, D) -> (B·S·heads, D): the gated norm works per head.
    normed = module.norm(out.flatten(0, 2), z.reshape(-1, module.head_v_dim))
    out_proj: nn.Module = module.out_proj
    result: Tensor = out_proj(normed.view(*hidden.shape[:2], -1))
    return result


def _projected(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Project to queries, keys and values (B, S, channels); gate; rate and decay (B, S, heads)."""
    if hasattr(module, "in_proj_qkv"):
        qkv, z, b, a = (
            getattr(module, f"in_proj_{suffix}")(hidden) for suffix in ("qkv", "z", "b", "a")
        )
        return qkv, z, b, a
    q, k, v, z, b, a = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
    )
    return torch.cat([x.flatten(2) for x in (q, k, v)], -1), z, b, a
