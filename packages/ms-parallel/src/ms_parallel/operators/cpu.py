"""Operators with hand-written gradients, for eager use on a CPU.

Plain torch saves every intermediate of norm and rotation and reads it again in the backward pass.
These save only their inputs, and their float32 outputs are bit-identical. Compiled code does not
need them: the compiler fuses the plain operators. Attention with sinks never materializes the
scores.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ms_parallel.torch_private import FakeTensor, flash_attention, flash_attention_backward


def widen(x: Tensor) -> Tensor:
    """Cast `x` to the accumulation dtype: float32, or float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()


def has_no_values(tensor: Tensor) -> bool:
    """Whether a tensor is a `FakeTensor`, as used for predicting memory."""
    return isinstance(tensor, FakeTensor)


def serves(*tensors: Tensor) -> bool:
    """Whether all are plain or fake float32 CPU tensors and torch.compile is not tracing."""
    return not torch.compiler.is_compiling() and all(
        type(tensor) in (Tensor, nn.Parameter, FakeTensor)
        and tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
        for tensor in tensors
    )


class RMSNorm(torch.autograd.Function):
    """`x · r · weight` with r = 1 / sqrt(mean(x²) + eps) over the last dim.

    With x̂ = x · r and ĝ = g · weight: ∂x = r · (ĝ - x̂ · mean(ĝ · x̂)), ∂weight = Σ g · x̂
    (Zhang & Sennrich 2019, arXiv:1910.07467).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalize x (..., H) over its last dim."""
        return x * _scale(x, eps) * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        """Save the inputs; recomputing the scale is cheap."""
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of x and, if it requires one, of the weight."""
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward
            y = F.rms_norm(x, weight.shape, weight, ctx.eps)
            trainable = [t for t in (x, weight) if t.requires_grad]
            grads = iter(torch.autograd.grad(y, trainable, grad, create_graph=True))
            return *(next(grads) if t.requires_grad else None for t in (x, weight)), None
        width = x.shape[-1]
        r = _scale(x, ctx.eps)
        products = (grad * x).mul_(r).reshape(-1, width)  # g · x̂
        means = torch.mv(products, weight).div_(-width).view_as(r)
        grad_x = (grad * weight).addcmul_(x, means.mul_(r)).mul_(r)
        return grad_x, products.sum(0) if ctx.needs_input_grad[1] else None, None


def _scale(x: Tensor, eps: float) -> Tensor:
    """Compute 1 / sqrt(mean(x²) + eps): (..., H) to (..., 1)."""
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


class Rotate(torch.autograd.Function):
    """`x · cos + roll(x) · sin`: `roll` swaps the halves, `sin` is negated in the first half.

    A rotation, so the backward pass rotates the gradient by the negated angles
    (Su et al. 2021, arXiv:2104.09864).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x (B, S, heads, D) by cos and sin (B or 1, S, 1, D)."""
        # One roll is about 25% faster than slicing and concatenating the halves.
        return (x.roll(x.shape[-1] // 2, -1) * sin).add_(x * cos)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        """Save the cosines and sines."""
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Rotate the gradient of x by the negated angles; the angles get no gradient."""
        cos, sin = ctx.saved_tensors
        grad_x: Tensor = Rotate.apply(grad, cos, -sin)  # type: ignore[no-untyped-call]
        return grad_x, None, None


def takes_sinks(*tensors: Tensor) -> bool:
    """Whether `attend` supports these tensors: on CPU, non-empty, last dim contiguous, eager."""
    return not torch.compiler.is_compiling() and all(
        type(tensor) in (Tensor, nn.Parameter, FakeTensor)
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
        and tensor.stride(-1) == 1
        for tensor in tensors
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    """Compute attention with sinks on (B, heads, S, D) tensors; `mask` is True for visible keys."""
    if mask is not None:
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    out: Tensor = _WithSinks.apply(q, k, v, sinks, mask, causal, scale)  # type: ignore[no-untyped-call]
    return out


class _WithSinks(torch.autograd.Function):
    """Attention with sinks on top of torch's fused attention kernel.

    The fused kernel returns L = log Σ e^score for each query. A sink changes it to
    L' = log(e^L + e^sink) and scales the output by sigmoid(L - sink). Given L' and the scaled
    output, the kernel's backward yields the gradients of q, k and v; the gradient of a sink is
    -Σ e^(sink - L') · (gradient · output).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Tensor:
        """Compute attention with sinks, (B, Hq, Sq, D)."""
        out: Tensor
        out, lse = flash_attention(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        sinks = sinks.to(lse.dtype)[:, None]
        out = (out * (lse - sinks).sigmoid().unsqueeze(-1)).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, mask, out, torch.logaddexp(lse, sinks))
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of q, k, v and the sinks."""
        q, k, v, sinks, mask, out, lse = ctx.saved_tensors
        grads_qkv = flash_attention_backward(
            grad, q, k, v, out, lse, 0.0, ctx.causal, attn_mask=mask, scale=ctx.scale
        )
        delta = (grad.to(lse.dtype) * out).sum(-1)  # (B, Hq, Sq)
        grad_sinks = -((sinks - lse).exp() * delta).sum((0, 2)) if ctx.needs_input_grad[3] else None
        return *grads_qkv, grad_sinks, None, None, None
