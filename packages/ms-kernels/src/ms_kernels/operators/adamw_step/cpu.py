"""AdamW by torch's fused kernel, in blocks if weights or gradient are narrower than the moments."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ms_kernels.backends.cpu import BLOCK_BYTES, on_cpu
from ms_kernels.contracts.call import Call
from ms_kernels.operators.adamw_step.contract import CONTRACT


def adamw_step(
    weights: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *options: Any
) -> None:
    """Update weights and moments in place."""
    step, learning_rate, betas, eps, weight_decay = options
    wide = mean.dtype
    flat = [tensor.detach().view(-1) for tensor in (weights, gradient, mean, square)]
    narrow = flat[0].dtype != wide or flat[1].dtype != wide
    length = BLOCK_BYTES // 4 if narrow else max(len(flat[0]), 1)
    with torch.no_grad():
        for start in range(0, len(flat[0]), length):
            weight_block, grad_block, first, second = (
                tensor[start : start + length] for tensor in flat
            )
            values = weight_block.to(wide)
            adamw(
                [values],
                [grad_block.to(wide)],
                [first],
                [second],
                [],
                # The kernel increments the step.
                [torch.tensor(float(step - 1))],
                fused=True,
                amsgrad=False,
                beta1=betas[0],
                beta2=betas[1],
                lr=learning_rate,
                weight_decay=weight_decay,
                eps=eps,
                maximize=False,
            )
            if values.dtype != weight_block.dtype:
                weight_block.copy_(values)


def _refuses(call: Call) -> str | None:
    """Decline non-contiguous tensors, and torch.compile, which fuses the reference."""
    if call.compiling:
        return "torch.compile fuses the reference itself"
    for name, meta in zip(("weights", "gradient", "mean", "square"), call.present, strict=True):
        if not meta.contiguous:
            return f"torch's fused kernel needs contiguous tensors, and {name} is not"
    return None


IMPLEMENTATION = on_cpu(
    CONTRACT,
    adamw_step,
    "torch's fused kernel, one pass over memory",
    refuses=_refuses,
)
