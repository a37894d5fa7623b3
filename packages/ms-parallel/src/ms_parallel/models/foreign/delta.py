"""Packed rows through the gated delta networks of transformers, all documents at once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ms_parallel.operators.cpu import widen
from ms_parallel.operators.protocol import Ops

NEEDED = ("A_log", "conv1d", "dt_bias", "head_k_dim", "head_v_dim", "key_dim", "norm", "out_proj")


def is_delta(module: Any) -> bool:
    """Return whether a module is a gated delta network, in one of the two forms known here.

    Qwen3.5 projects to queries, keys and values, gate, rate and decay apart; Qwen3-Next to two
    matrices whose order a function of the module undoes.
    """
    apart = all(hasattr(module, f"in_proj_{each}") for each in ("qkv", "z", "b", "a"))
    together = hasattr(module, "in_proj_qkvz") and hasattr(module, "fix_query_key_value_ordering")
    known = all(hasattr(module, name) for name in NEEDED)
    return known and (apart or together) and getattr(module, "activation", None) == "silu"


def delta_forward(module: Any, hidden: Tensor, documents: Tensor | None, ops: Ops) -> Tensor:
    """Apply the module to (B, S, H) so that documents (B, S) int32 know nothing of each other."""
    mixed, z, b, a = _projected(module, hidden)
    weight = module.conv1d.weight.squeeze(1)
    mixed = ops.causal_conv1d(mixed, weight, module.conv1d.bias, documents=documents, silu=True)
    q, k, v = torch.split(mixed, [module.key_dim, module.key_dim, module.value_dim], -1)
    q, k, v = (
        x.reshape(*hidden.shape[:2], -1, width)
        for x, width in ((q, module.head_k_dim), (k, module.head_k_dim), (v, module.head_v_dim))
    )
    g = -widen(module.A_log).exp() * F.softplus(widen(a) + module.dt_bias)
    out = ops.gated_delta_rule(q, k, v, g, b.sigmoid(), documents=documents, normalize=True)
    made = module.norm(out.flatten(0, 2), z.reshape(-1, module.head_v_dim))
    outward: nn.Module = module.out_proj
    result: Tensor = outward(made.view(*hidden.shape[:2], -1))
    return result


def _projected(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Project to queries, keys and values (B, S, channels); gate; rate and decay (B, S, heads)."""
    if hasattr(module, "in_proj_qkv"):
        qkv, z, b, a = (
            getattr(module, f"in_proj_{each}")(hidden) for each in ("qkv", "z", "b", "a")
        )
        return qkv, z, b, a
    q, k, v, z, b, a = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
    )
    return torch.cat([x.flatten(2) for x in (q, k, v)], -1), z, b, a
