"""Matrix product per expert through npu_grouped_matmul.

The operator has no gradient, so it is implemented here as two more grouped products: grouped over
rows for x, and over the inner dim for the weights. The operator does not check the counts and would
index beyond the rows, so it gets cumulative sums clamped to the number of rows; the last row is NaN
if the counts do not add up. It does not synchronize with the device.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.backends.ascend import on_npu
from ms_kernels.operators.grouped_matmul.contract import CONTRACT

ROWS, INNER = 0, 2
"""npu_grouped_matmul's `group_type`: the dim of the left matrix that is split into groups."""
ONE_RESULT = 3
RUNNING_SUMS = 0
"""`group_list_type`: the list contains the end of each group."""


def grouped_matmul(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Return each row times its expert's matrix, without reading the counts on the host."""
    rows = len(x)
    sums = counts.to(torch.int64).clamp(0, rows + 1).cumsum(0)
    ends = sums.clamp(max=rows)
    ends[-1:].fill_(rows)  # every row belongs to an expert, so the full result is written
    wrong = sums[-1:] != rows
    result: Tensor = _Grouped.apply(x, weights, counts, ends, wrong)  # type: ignore[no-untyped-call]
    return result


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, counts: Tensor, ends: Tensor, wrong: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weights, counts, ends)
        result = _product(x, weights, ends, ROWS)
        result[-1:].masked_fill_(wrong, torch.nan)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, counts, ends = ctx.saved_tensors
        grad_x = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(grad, weights.transpose(1, 2), ends, ROWS)
        if ctx.needs_input_grad[1]:
            grad_weights = _product(x.T, grad, ends, INNER)
            # CANN does not guarantee zeros for an empty group.
            grad_weights.masked_fill_((counts == 0)[:, None, None], 0)
        return grad_x, grad_weights, None, None, None


def _product(x: Tensor, y: Tensor, ends: Tensor, group_type: int) -> Tensor:
    result: Tensor = torch.ops.npu.npu_grouped_matmul(
        [x],
        [y],
        group_list=ends,
        split_item=ONE_RESULT,
        group_type=group_type,
        group_list_type=RUNNING_SUMS,
    )[0]
    return result


IMPLEMENTATION = on_npu(
    CONTRACT,
    grouped_matmul,
    "npu_grouped_matmul: one kernel for all experts, without synchronization",
)
