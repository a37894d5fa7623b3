"""Tokens to experts and back, and their matrix products.

npu_grouped_matmul has no gradient: ours is two more grouped products, over rows for x and over
the inner dim for the weights. Places are int32 there and int64 here.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.ascend.limits import NPU, REALS, empty, given
from ms_kernels.contract import Call, describe
from ms_kernels.registry import Implementation

__all__ = ["IMPLEMENTATIONS", "grouped_matmul", "permute_tokens", "unpermute_tokens"]

MOST_CHOICES = 512
MOST_INDICES = 2**24 - 1
"""Beyond it, indices are sorted as floats that cannot tell them apart."""

ROWS, INNER = 0, 2
"""npu_grouped_matmul's `group_type`: which dim of the left matrix is cut into groups."""
ONE_RESULT = 3
COUNTS = 1
"""`group_list_type`: the list holds sizes, not running sums."""


def permute_tokens(x: Tensor, experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows in order of expert, each expert's counts, and where each choice went."""
    rows, places = torch.ops.npu.npu_moe_token_permute(x, experts)
    flat = experts.reshape(-1).to(torch.int64)
    counts = flat.new_zeros(count).scatter_add(0, flat, torch.ones_like(flat))
    return rows, counts, places.view(experts.shape).to(torch.int64)


def unpermute_tokens(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return ``Σ_c weights[t, c] · rows[places[t, c]]``."""
    if weights is None:  # no shares would mean one choice a token
        weights = rows.new_ones(places.shape)
    flat = places.reshape(-1).to(torch.int32)
    result: Tensor = torch.ops.npu.npu_moe_token_unpermute(rows, flat, weights)
    return result


def grouped_matmul(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Return each row times its expert's matrix; the counts are never waited for."""
    if len(weights) == 1:
        return x @ weights[0]
    result: Tensor = _Grouped.apply(x, weights, counts.to(torch.int64))  # type: ignore[no-untyped-call]
    return result


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, counts)
        return _product(x, weights, counts, ROWS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, counts = ctx.saved_tensors
        grad_x = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(grad, weights.transpose(1, 2), counts, ROWS)
        if ctx.needs_input_grad[1]:
            grad_weights = _product(x.T, grad, counts, INNER)
            # CANN does not promise zeros for a group of no rows.
            grad_weights.masked_fill_((counts == 0)[:, None, None], 0)
        return grad_x, grad_weights, None


def _product(left: Tensor, right: Tensor, counts: Tensor, group_type: int) -> Tensor:
    result: Tensor = torch.ops.npu.npu_grouped_matmul(
        [left],
        [right],
        group_list=counts,
        split_item=ONE_RESULT,
        group_type=group_type,
        group_list_type=COUNTS,
    )[0]
    return result


def _permutes(call: Call) -> str | None:
    """Decline more choices than can be sorted."""
    experts = given(call)[1]
    tokens, choices = experts.shape
    if choices > MOST_CHOICES:
        return f"takes at most {MOST_CHOICES} choices a token, not {choices}"
    if tokens * choices > MOST_INDICES:
        return f"sorts at most {MOST_INDICES} choices, and here are {tokens * choices}"
    return empty(call)


def _unpermutes(call: Call) -> str | None:
    """Decline weights of another dtype: the fused sum's rounding of them is not documented."""
    rows, _, *weighing = given(call)
    for weights in weighing:
        if weights.dtype != rows.dtype:
            fits = f"takes weights of {describe(rows.dtype)}, as rows are"
            return f"{fits}, not {describe(weights.dtype)}"
    return _permutes(call)


IMPLEMENTATIONS = (
    Implementation(
        operator="permute_tokens",
        backend="ascend",
        run=permute_tokens,
        devices=NPU,
        dtypes=REALS,
        refuses=_permutes,
        merit="npu_moe_token_permute: sorts and copies in one kernel",
    ),
    Implementation(
        operator="unpermute_tokens",
        backend="ascend",
        run=unpermute_tokens,
        devices=NPU,
        dtypes=REALS,
        refuses=_unpermutes,
        merit="npu_moe_token_unpermute: looks up, weighs and sums in one kernel",
    ),
    Implementation(
        operator="grouped_matmul",
        backend="ascend",
        run=grouped_matmul,
        devices=NPU,
        dtypes=REALS,
        refuses=empty,
        merit="npu_grouped_matmul: one kernel for all experts, none waits for the counts",
    ),
)
