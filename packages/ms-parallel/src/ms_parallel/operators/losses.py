"""Cross-entropy from logits, and from hidden states without materializing all logits.

Shapes: H hidden, V vocabulary, N rows. Losses are computed in float32 (float64 for float64).
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ms_parallel.operators.cpu import has_no_values, widen
from ms_parallel.operators.protocol import Reduction
from ms_parallel.torch_private import has_triton

P = ParamSpec("P")
R = TypeVar("R")

_CHUNK_BYTES = 1 << 28
"""Logits per chunk of `linear_cross_entropy`; up to this size they are saved, not recomputed."""


def _fused(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` at its first call with CUDA tensors; otherwise run it eagerly.

    On a GPU, unfused pointwise operators are bound by memory traffic. The first argument of
    `function` must be a tensor.
    """
    compiled: Callable[P, R] | None = None

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        first: Any = args[0]
        assert isinstance(first, Tensor)
        if (
            first.device.type != "cuda"
            or has_no_values(first)
            or torch.compiler.is_compiling()
            or not has_triton()
        ):
            return function(*args, **kwargs)
        compiled = compiled or torch.compile(function)
        return compiled(*args, **kwargs)

    return run


def capped(x: Tensor, softcap: float) -> Tensor:
    """Soft-cap values: softcap · tanh(x / softcap)."""
    return (x / softcap).tanh() * softcap


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute -log p(target) under softmax(logits), plus z_loss · logsumexp².

    Args:
        logits: (..., V).
        targets: (...) int64.
        ignore_index: Target without a loss; it does not count in the mean.
        label_smoothing: Probability mass spread uniformly over all classes.
        z_loss: Weight of the squared log-normalizer.
        reduction: `"mean"` over counted targets (0 if all are ignored), `"sum"`, or `"none"`
            (zero where ignored).

    Returns:
        float32 (float64 for float64) scalar, or (...) for `"none"`.
    """
    # (N, V) in the accumulation dtype.
    flat = widen(logits.reshape(-1, logits.shape[-1]))
    targets_flat = targets.reshape(-1)
    losses = F.cross_entropy(
        flat,
        targets_flat,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    counted = targets_flat != ignore_index
    if z_loss:
        losses = losses + (z_loss * flat.logsumexp(-1).square()).masked_fill(~counted, 0)
    if reduction == "none":
        return losses.reshape(targets.shape)
    total = losses.sum()
    return total / counted.sum().clamp(min=1) if reduction == "mean" else total


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    weights: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Compute `cross_entropy(hidden @ weight.T, targets)` without materializing all logits.

    With reduction "sum" both gradients are computed in the forward pass, one chunk of logits at a
    time: three matrix products, as with all logits in memory. With "none", and for float16, which
    the sums would overflow, the backward pass recomputes the logits by chunks; up to 256 MiB of
    logits are saved instead.

    Args:
        hidden: (..., H).
        weight: (V, H).
        targets: (...) int64.
        weights: (...) weight per target; with reduction "sum" only.
        ignore_index: target without a loss.
        reduction: as in `cross_entropy`.
        softcap: logits become softcap · tanh(logit / softcap).
        z_loss: weight of the squared logsumexp.

    Returns:
        float32 (float64 for float64) scalar, or (...) for `"none"`.
    """
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    chunk = max(1, _CHUNK_BYTES // (4 * weight.shape[0]))  # 4 bytes per float32 logit
    fits = rows.shape[0] <= chunk
    if reduction == "sum" and _sums_in_forward(hidden, weight, fits=fits):
        factors = None if weights is None else weights.reshape(-1)
        total: Tensor = _SummedLoss.apply(  # type: ignore[no-untyped-call]
            rows, weight, flat, factors, ignore_index, softcap, z_loss
        )
        return total
    if fits:
        logits = F.linear(rows, weight)
        logits = logits if softcap is None else capped(logits, softcap)
        losses = cross_entropy(
            logits, flat, ignore_index=ignore_index, z_loss=z_loss, reduction="none"
        )
    else:
        losses = _ChunkedLosses.apply(  # type: ignore[no-untyped-call]
            rows, weight, flat, ignore_index, chunk, softcap, z_loss
        )
    if weights is not None:
        losses = losses * weights.reshape(-1)
    if reduction == "none":
        return losses.reshape(targets.shape)
    total = losses.sum()
    return total / (flat != ignore_index).sum().clamp(min=1) if reduction == "mean" else total


def _sums_in_forward(hidden: Tensor, weight: Tensor, *, fits: bool) -> bool:
    """Whether a summed loss computes its gradients in the forward pass.

    On a CPU only if the logits exceed one chunk: saving them is as fast there.
    """
    trains = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    plain = type(hidden) in (Tensor, nn.Parameter) and hidden.dtype != torch.float16
    return trains and plain and not (fits and hidden.device.type == "cpu")


class _SummedLoss(torch.autograd.Function):
    """Weighted sum of the losses of rows (N, H); saves both gradients instead of logits."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        targets: Tensor,
        factors: Tensor | None,
        ignore_index: int,
        softcap: float | None,
        z_loss: float,
    ) -> Tensor:
        """Compute the sum, a float32 or float64 scalar, and both gradients by chunks of rows."""
        counted = targets != ignore_index
        # Only ignored targets are replaced; any other out-of-range target fails in the gather.
        classes = targets.masked_fill(~counted, 0)
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        # Weight of each row in the sum, 0 for ignored targets.
        scale = counted.to(wide)
        if factors is not None:
            scale = scale * factors.to(wide)
        total = torch.zeros((), dtype=wide, device=rows.device)
        grad_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        chunk = _chunk_rows(rows, weight)
        for start in range(0, rows.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = F.linear(rows[part], weight)  # (n, V)
            losses, delta = _loss_and_gradient(logits, classes[part], scale[part], softcap, z_loss)
            total += losses.sum()
            # ∂h = δ·W and ∂W = δᵀ·h, with δ the gradient of the logits.
            if grad_rows is not None:
                torch.mm(delta, weight, out=grad_rows[part])
            if grad_weight is not None:
                _add_product(grad_weight, delta.t(), rows[part])
        # Rounded once, after all chunks were summed.
        saved_weight_grad = None if grad_weight is None else grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_rows, saved_weight_grad)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Scale both gradients by the gradient of the sum."""
        scaled = (None if saved is None else saved * grad for saved in ctx.saved_tensors)
        return *scaled, None, None, None, None, None


def _chunk_rows(rows: Tensor, weight: Tensor) -> int:
    """Rows per chunk: logits and their gradient take 256 MiB on a CPU, 1 GiB on an accelerator."""
    budget_bytes = _CHUNK_BYTES if rows.device.type == "cpu" else 4 * _CHUNK_BYTES
    return max(1, budget_bytes // (2 * rows.element_size() * weight.shape[0]))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, which may have a wider dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


@_fused
def _loss_and_gradient(
    logits: Tensor, classes: Tensor, scale: Tensor, softcap: float | None, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Return the scaled losses (n,) and the gradient of their sum with respect to logits (n, V)."""
    wide = widen(logits)
    wide = wide if softcap is None else capped(wide, softcap)
    # loss = n - x[target], with n = logsumexp(x) and p = exp(x - n).
    normalizer = wide.logsumexp(-1)
    losses = normalizer - wide.gather(-1, classes[:, None])[:, 0]
    p = (wide - normalizer[:, None]).exp()
    if z_loss:
        losses = losses + z_loss * normalizer.square()
        # ∂(z·n²)/∂x = 2·z·n·p.
        p = p * (1 + 2 * z_loss * normalizer)[:, None]
    is_target = torch.arange(logits.shape[1], device=logits.device) == classes[:, None]
    delta = (p - is_target.to(p.dtype)) * scale[:, None]
    if softcap is not None:  # derivative of softcap · tanh(x / softcap)
        delta = delta * (1 - (wide / softcap).square())
    return losses * scale, delta.to(logits.dtype)


class _ChunkedLosses(torch.autograd.Function):
    """Losses (N,) of rows (N, H); saves only the log-normalizers, not the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore_index: int,
        chunk: int,
        softcap: float | None,
        z_loss: float,
    ) -> Tensor:
        """Compute -log p(target) of each row, float32 or float64."""
        counted = targets != ignore_index
        # Only ignored targets are replaced; any other out-of-range target fails in the gather.
        classes = targets.masked_fill(~counted, 0)
        normalizers = widen(rows.new_empty(rows.shape[0]))
        losses = torch.empty_like(normalizers)
        for start in range(0, rows.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = widen(F.linear(rows[part], weight))
            logits = logits if softcap is None else capped(logits, softcap)
            normalizers[part] = logits.logsumexp(-1)
            target_logits = logits.gather(-1, classes[part, None]).squeeze(-1)
            losses[part] = (normalizers[part] - target_logits).masked_fill(~counted[part], 0)
        ctx.save_for_backward(rows, weight, classes, counted, normalizers)
        ctx.chunk, ctx.softcap, ctx.z_loss = chunk, softcap, z_loss
        if z_loss:
            losses += (z_loss * normalizers.square()).masked_fill(~counted, 0)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute both gradients; the weight's accumulates over chunks in float32 or float64."""
        rows, weight, classes, counted, normalizers = ctx.saved_tensors
        scale = grad.masked_fill(~counted, 0)
        grad_rows, grad_weight = head_gradients(
            rows,
            weight,
            classes,
            counted,
            scale,
            normalizers,
            ctx.chunk,
            softcap=ctx.softcap,
            z_loss=ctx.z_loss,
        )
        return grad_rows, grad_weight, None, None, None, None, None


def head_gradients(
    rows: Tensor,
    weight: Tensor,
    classes: Tensor,
    here: Tensor,
    scale: Tensor,
    normalizers: Tensor,
    chunk: int,
    *,
    logits: Tensor | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    needs_grad_of: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """Compute gradients of -log softmax(h·Wᵀ)[target], p - onehot(target), by chunks of rows.

    The z-loss z·n², with n the log-normalizer, adds 2·z·n·p.

    Args:
        rows: (N, H).
        weight: (V, H), or this process's vocabulary shard.
        classes: (N,) targets as row indices of `weight`.
        here: (N,) bool, True for targets in this shard.
        scale: (N,) gradient of each loss.
        normalizers: (N,) logsumexp over the full vocabulary.
        chunk: rows per chunk.
        logits: (N, V) saved logits, which make one chunk; None recomputes them.
        softcap: soft cap on the logits.
        z_loss: weight of the squared log-normalizer.
        needs_grad_of: which gradients to compute, of `rows` and of `weight`.

    Returns:
        Gradients of the rows (this process's partial sum) and of the weight, accumulated in float32
        or float64.
    """
    grad_rows = torch.empty_like(rows) if needs_grad_of[0] else None
    grad_weight = widen(torch.zeros_like(weight)) if needs_grad_of[1] else None
    for start in range(0, rows.shape[0], chunk):
        part = slice(start, start + chunk)
        if logits is None:
            chunk_logits = widen(F.linear(rows[part], weight))
            chunk_logits = chunk_logits if softcap is None else capped(chunk_logits, softcap)
        else:
            chunk_logits = logits
        # p, reusing the memory of the difference.
        delta = (chunk_logits - normalizers[part, None]).exp_()
        if z_loss:
            delta = delta.mul_(1 + 2 * z_loss * normalizers[part, None])
        # Minus 1 at the target; -0 for targets of other shards.
        delta.scatter_add_(-1, classes[part, None], -here[part, None].to(delta.dtype))
        delta = delta.mul_(scale[part, None])
        if softcap is not None:  # derivative of softcap · tanh(x / softcap)
            delta = delta.mul_(1 - (chunk_logits / softcap).square())
        delta = delta.to(weight.dtype)
        if grad_rows is not None:
            torch.mm(delta, weight, out=grad_rows[part])
        if grad_weight is not None:
            grad_weight += delta.t() @ rows[part]
    return grad_rows, None if grad_weight is None else grad_weight.to(weight.dtype)
