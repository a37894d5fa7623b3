"""Rows summed back to their tokens through npu_moe_token_unpermute.

An out-of-range index is clamped to a valid row, and its weight is NaN, which makes the token NaN.
It does not synchronize with the device.
"""

import torch
from torch import Tensor

from ms_kernels.backends.ascend import REALS, on_npu
from ms_kernels.contracts.call import Call, describe
from ms_kernels.operators.permute_tokens.ascend import refuse_many_choices
from ms_kernels.operators.unpermute_tokens.contract import CONTRACT


def unpermute_tokens(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return ``Σ_c weights[t, c] · rows[places[t, c]]``."""
    if weights is None:  # without weights the operator assumes one choice per token
        weights = rows.new_ones(places.shape)
    valid_places = places.clamp(0, len(rows) - 1)
    weights = weights.masked_fill(valid_places != places, torch.nan)
    flat = valid_places.reshape(-1).to(torch.int32)
    result: Tensor = torch.ops.npu.npu_moe_token_unpermute(rows, flat, weights)
    return result


def _refuses(call: Call) -> str | None:
    """Decline float64 weights; the operator supports mixed dtypes of rows and weights otherwise."""
    for weights in call.present[2:]:
        if weights.dtype not in REALS:
            fits = ", ".join(describe(dtype) for dtype in REALS)
            return f"needs weights of {fits}, not {describe(weights.dtype)}"
    return refuse_many_choices(call)


IMPLEMENTATION = on_npu(
    CONTRACT,
    unpermute_tokens,
    "npu_moe_token_unpermute: gathers, weights and sums in one kernel",
    refuses=_refuses,
)
