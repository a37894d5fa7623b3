"""Cross-entropy through npu_cross_entropy_loss.

Differences from the contract, bridged here:

1. The operator returns losses and log-probabilities in the logits' dtype, so half-precision logits
   are converted to float32 first.
2. It does not support a negative `ignore_index`. Ignored targets are replaced by class 0 and their
   losses by 0, which also zeroes their gradients; out-of-range targets get a NaN loss.
3. Reductions are computed here, over the rows that are not ignored.
"""

from typing import Any

import torch
from torch import Tensor

from ms_kernels.backends.ascend import empty, on_npu, within_classes
from ms_kernels.contracts.call import Call
from ms_kernels.operators.cross_entropy.contract import CONTRACT, LossOptions, reduce

MAX_ROWS = 200_000


def cross_entropy(logits: Tensor, targets: Tensor, *options: Any) -> Tensor:
    """Return ``-log p[target]``; saves all log p for the backward pass."""
    settings = LossOptions(*options)
    ignored = targets == settings.ignore_index
    flat = logits.reshape(-1, logits.shape[-1]).float()
    classes, out_of_range = within_classes(targets, ignored, flat.shape[1])
    classes = classes.reshape(-1).to(torch.int64)
    losses = torch.ops.npu.npu_cross_entropy_loss(flat, classes, reduction="none")[0]
    losses = losses.view(targets.shape).masked_fill(out_of_range, torch.nan).masked_fill(ignored, 0)
    return reduce(losses, ignored, settings.reduction)


def _refuses(call: Call) -> str | None:
    """Decline options that the fused operator cannot differentiate, and sizes beyond its limit."""
    logits = call.present[0]
    if not LossOptions(*call.options).plain:
        return "does not support label smoothing, or a z-loss with a gradient"
    rows = 1
    for size in logits.shape[:-1]:
        rows *= size
    if rows > MAX_ROWS:
        return f"supports at most {MAX_ROWS} rows, not {rows}"
    return empty(call)


IMPLEMENTATION = on_npu(
    CONTRACT,
    cross_entropy,
    "npu_cross_entropy_loss: softmax and its logarithm in one kernel",
    refuses=_refuses,
)
