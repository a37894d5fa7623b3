"""Each expert's matrix product through npu_grouped_matmul.

It has no gradient: ours is two more grouped products, over rows for x and over the inner dim for
the weights. It would follow counts out of the rows, so it gets running sums that end with them;
counts that do not make the last row NaN. Nothing is waited for.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.backends.ascend import on_npu
from ms_kernels.operators.grouped_matmul.contract import CONTRACT

ROWS, INNER = 0, 2
"""npu_grouped_matmul's `group_type`: which dim of the left matrix is cut into groups."""
ONE_RESULT = 3
RUNNING_SUMS = 0
"""`group_list_type`: the list holds where each group ends."""


def grouped_matmul(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Return each row times its expert's matrix; the counts are never waited for."""
    rows = len(x)
    sums = counts.to(torch.int64).clamp(0, rows + 1).cumsum(0)
    ends = sums.clamp(max=rows)
    ends[-1:].fill_(rows)  # each row has an expert, so none of the result is left unwritten
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
            # CANN does not promise zeros for a group of no rows.
            grad_weights.masked_fill_((counts == 0)[:, None, None], 0)
        return grad_x, grad_weights, None, None, None


def _product(left: Tensor, right: Tensor, ends: Tensor, group_type: int) -> Tensor:
    result: Tensor = torch.ops.npu.npu_grouped_matmul(
        [left],
        [right],
        group_list=ends,
        split_item=ONE_RESULT,
        group_type=group_type,
        group_list_type=RUNNING_SUMS,
    )[0]
    return result


IMPLEMENTATION = on_npu(
    CONTRACT,
    grouped_matmul,
    "npu_grouped_matmul: one kernel for all experts, none waits for the counts",
)
