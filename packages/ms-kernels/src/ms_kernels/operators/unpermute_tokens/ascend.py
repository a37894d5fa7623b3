"""Rows led back to their tokens through npu_moe_token_unpermute.

A place that is no row is not followed: it gets the nearest one, and a weight that makes its token
NaN. No device is waited for.
"""

import torch
from torch import Tensor

from ms_kernels.backends.ascend import REALS, on_npu
from ms_kernels.contracts.call import Call, describe
from ms_kernels.operators.permute_tokens.ascend import few_choices
from ms_kernels.operators.unpermute_tokens.contract import CONTRACT


def unpermute_tokens(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return ``Σ_c weights[t, c] · rows[places[t, c]]``."""
    if weights is None:  # no shares would mean one choice a token
        weights = rows.new_ones(places.shape)
    there = places.clamp(0, len(rows) - 1)
    weights = weights.masked_fill(there != places, torch.nan)
    flat = there.reshape(-1).to(torch.int32)
    result: Tensor = torch.ops.npu.npu_moe_token_unpermute(rows, flat, weights)
    return result


def _refuses(call: Call) -> str | None:
    """Decline weights in float64; other dtypes than the rows' are widened as the rows are."""
    for weights in call.present[2:]:
        if weights.dtype not in REALS:
            fits = ", ".join(describe(dtype) for dtype in REALS)
            return f"takes weights of {fits}, not {describe(weights.dtype)}"
    return few_choices(call)


IMPLEMENTATION = on_npu(
    CONTRACT,
    unpermute_tokens,
    "npu_moe_token_unpermute: looks up, weighs and sums in one kernel",
    refuses=_refuses,
)
