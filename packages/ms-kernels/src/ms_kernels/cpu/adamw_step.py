"""AdamW by torch's fused kernel, in blocks where weights are narrower than their moments."""

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ms_kernels.contract import Call
from ms_kernels.cpu.blocks import BLOCK_BYTES

__all__ = ["adamw_step", "refuses"]


def adamw_step(
    weights: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    step: int = 1,
    learning_rate: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """Write new weights and moments."""
    wide = mean.dtype
    flat = [each.detach().view(-1) for each in (weights, gradient, mean, square)]
    narrow = flat[0].dtype != wide or flat[1].dtype != wide
    length = BLOCK_BYTES // 4 if narrow else max(len(flat[0]), 1)
    with torch.no_grad():
        for start in range(0, len(flat[0]), length):
            own, slope, first, second = (each[start : start + length] for each in flat)
            values = own.to(wide)
            adamw(
                [values],
                [slope.to(wide)],
                [first],
                [second],
                [],
                # The kernel counts the step itself.
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
            if values.dtype != own.dtype:
                own.copy_(values)


def refuses(call: Call) -> str | None:
    """Decline what the fused kernel cannot walk through as one row of numbers."""
    if call.compiling:
        return "torch.compile fuses the reference by itself"
    for name, fact in zip(("weights", "gradient", "mean", "square"), call.facts, strict=True):
        assert fact is not None
        expected = 1
        for size, stride in zip(reversed(fact.shape), reversed(fact.strides), strict=True):
            if size > 1 and stride != expected:
                return f"torch's fused kernel wants contiguous tensors, and {name} is not"
            expected *= size
    return None
