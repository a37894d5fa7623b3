"""Cross-entropy through npu_cross_entropy_loss.

Differences from the contract, bridged here:

1. Losses and log-probabilities have the logits' dtype: half-precision logits are widened first.
2. A negative `ignore_index` names no class there. Ignored targets are set to class 0, and their
   losses to 0, which also makes their gradients 0; the loss of a target that is no class is NaN.
3. Reductions are made here, over the rows that count.
"""

from typing import Any

import torch
from torch import Tensor

from ms_kernels.backends.ascend import empty, on_npu, within_classes
from ms_kernels.contracts.call import Call
from ms_kernels.operators.cross_entropy.contract import CONTRACT, LossOptions, reduce

MOST_ROWS = 200_000


def cross_entropy(logits: Tensor, targets: Tensor, *options: Any) -> Tensor:
    """Return ``-log p[target]``; keep all log p for the backward pass."""
    settings = LossOptions(*options)
    ignored = targets == settings.ignore_index
    flat = logits.reshape(-1, logits.shape[-1]).float()
    chosen, foreign = within_classes(targets, ignored, flat.shape[1])
    chosen = chosen.reshape(-1).to(torch.int64)
    losses = torch.ops.npu.npu_cross_entropy_loss(flat, chosen, reduction="none")[0]
    losses = losses.view(targets.shape).masked_fill(foreign, torch.nan).masked_fill(ignored, 0)
    return reduce(losses, ignored, settings.reduction)


def _refuses(call: Call) -> str | None:
    """Decline what the fused operator does not offer with a gradient."""
    logits = call.present[0]
    if not LossOptions(*call.options).plain:
        return "has no label smoothing and no z-loss with a gradient"
    rows = 1
    for size in logits.shape[:-1]:
        rows *= size
    if rows > MOST_ROWS:
        return f"takes at most {MOST_ROWS} rows, and here are {rows}"
    return empty(call)


IMPLEMENTATION = on_npu(
    CONTRACT,
    cross_entropy,
    "npu_cross_entropy_loss: softmax and its logarithm in one kernel",
    refuses=_refuses,
)
