"""Cross-entropy in cache-sized blocks of rows; saves the logits and one value per row."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.backends.cpu import blocks, on_cpu
from ms_kernels.contracts.call import accumulator
from ms_kernels.operators.cross_entropy.contract import CONTRACT, LossOptions, reduce


def cross_entropy(logits: Tensor, targets: Tensor, *options: Any) -> Tensor:
    """Return ``-(1-s) log p[target] - s mean(log p) + z log²Z``."""
    settings = LossOptions(*options)
    ignored = targets == settings.ignore_index
    losses: Tensor = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        logits, targets, ignored, settings.label_smoothing, settings.z_loss
    )
    return reduce(losses, ignored, settings.reduction)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, ignored: Tensor, *smoothing: float
    ) -> Tensor:
        label_smoothing, z_loss = ctx.smoothing = smoothing
        flat = logits.reshape(-1, logits.shape[-1])
        class_index = targets.reshape(-1, 1).to(torch.int64).masked_fill(ignored.reshape(-1, 1), 0)
        wide = accumulator(logits.dtype)
        log_z, picked, mean = (flat.new_empty(class_index.shape, dtype=wide) for _ in range(3))
        for rows in blocks(*flat.shape):
            block = flat[rows].to(wide)
            log_z[rows] = block.logsumexp(-1, keepdim=True)
            picked[rows] = block.gather(-1, class_index[rows])
            if label_smoothing:
                mean[rows] = block.mean(-1, keepdim=True)
        losses = log_z - (1 - label_smoothing) * picked
        if label_smoothing:
            losses -= label_smoothing * mean
        if z_loss:
            losses += z_loss * log_z.square()
        ctx.save_for_backward(logits, class_index, ignored, log_z)
        return losses.view(targets.shape).masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, class_index, ignored, log_z = ctx.saved_tensors
        label_smoothing, z_loss = ctx.smoothing
        flat = logits.reshape(-1, logits.shape[-1])
        slope = grad.masked_fill(ignored, 0).reshape(-1, 1)
        softmax_scale = slope * (1 + 2 * z_loss * log_z)
        target_grad = slope * (label_smoothing - 1)
        result = torch.empty_like(flat, memory_format=torch.contiguous_format)
        for rows in blocks(*flat.shape):
            block = (flat[rows] - log_z[rows]).exp_().mul_(softmax_scale[rows])
            if label_smoothing:
                block.sub_(slope[rows] * (label_smoothing / flat.shape[-1]))
            block.scatter_add_(-1, class_index[rows], target_grad[rows])
            result[rows] = block
        return result.view(logits.shape), None, None, None, None


IMPLEMENTATION = on_cpu(
    CONTRACT,
    cross_entropy,
    "blocks of rows in the cache; saves the logits and one value per row",
)
