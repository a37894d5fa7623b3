"""Operators with gradients written out, for eager use on a CPU.

Plain torch keeps each intermediate of norm and rotation for the backward pass and walks it again
there. These keep their inputs alone, and give the same outputs bit for bit, in float32; a compiler
fuses the plain ones by itself. Attention with sinks never holds the scores.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ms_parallel.torch_private import FakeTensor, flash_attention, flash_attention_backward


def widen(x: Tensor) -> Tensor:
    """Return `x` in the dtype that sums are kept in: float32, or float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()


def has_no_values(tensor: Tensor) -> bool:
    """Return whether a tensor is one of torch's fakes: a shape on a device, to predict memory."""
    return isinstance(tensor, FakeTensor)


def serves(*tensors: Tensor) -> bool:
    """Return whether all are plain or fake float32 tensors on a CPU, and nothing is traced."""
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
        """Norm x over its last dim, (..., H) to the same."""
        return x * _scale(x, eps) * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        """Keep the inputs; the scale is quickly made again."""
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of x and of the weight, if it takes one."""
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # The gradient is to have one itself.
            y = F.rms_norm(x, weight.shape, weight, ctx.eps)
            wanted = [t for t in (x, weight) if t.requires_grad]
            found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
            return *(next(found) if t.requires_grad else None for t in (x, weight)), None
        width = x.shape[-1]
        r = _scale(x, ctx.eps)
        products = (grad * x).mul_(r).reshape(-1, width)  # g · x̂
        means = torch.mv(products, weight).div_(-width).view_as(r)
        of_x = (grad * weight).addcmul_(x, means.mul_(r)).mul_(r)
        return of_x, products.sum(0) if ctx.needs_input_grad[1] else None, None


def _scale(x: Tensor, eps: float) -> Tensor:
    """Compute 1 / sqrt(mean(x²) + eps), (..., H) to (..., 1)."""
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


class Rotate(torch.autograd.Function):
    """`x · cos + roll(x) · sin`, where `roll` swaps the halves and `sin` has the first one's sign.

    It is a rotation, so that its gradient is rotated by the same angles back
    (Su et al. 2021, arXiv:2104.09864).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x (B, S, heads, D) by cos and sin (B or 1, S, 1, D)."""
        # One roll swaps the halves: a quarter faster than two halves put together again.
        return (x.roll(x.shape[-1] // 2, -1) * sin).add_(x * cos)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        """Keep the angles."""
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Rotate the gradient of x back; the angles have none."""
        cos, sin = ctx.saved_tensors
        back: Tensor = Rotate.apply(grad, cos, -sin)  # type: ignore[no-untyped-call]
        return back, None, None


def takes_sinks(*tensors: Tensor) -> bool:
    """Return whether `attend` takes these: plain CPU tensors, none empty, rows dense, untraced."""
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
    """Attend with sinks, (B, heads, S, D) to the same; `mask` is True where a query may look."""
    if mask is not None:
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    made: Tensor = _WithSinks.apply(q, k, v, sinks, mask, causal, scale)  # type: ignore[no-untyped-call]
    return made


class _WithSinks(torch.autograd.Function):
    """torch's fused attention and its gradient, sinks put in between.

    The fused kernel keeps L = log Σ e^score of each row. With a sink it is L' = log(e^L + e^sink),
    and the result the one without times sigmoid(L - sink); the kernel's own gradient, given L' and
    that result, is the one with sinks, and a sink's is -Σ e^(sink - L') · (gradient · result).
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
        """Attend with sinks; return (B, Hq, Sq, D)."""
        out: Tensor
        out, kept = flash_attention(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        sinks = sinks.to(kept.dtype)[:, None]
        out = (out * (kept - sinks).sigmoid().unsqueeze(-1)).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, mask, out, torch.logaddexp(kept, sinks))
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of q, k, v and the sinks."""
        q, k, v, sinks, mask, out, kept = ctx.saved_tensors
        found = flash_attention_backward(
            grad, q, k, v, out, kept, 0.0, ctx.causal, attn_mask=mask, scale=ctx.scale
        )
        slopes = (grad.to(kept.dtype) * out).sum(-1)
        of_sinks = -((sinks - kept).exp() * slopes).sum((0, 2)) if ctx.needs_input_grad[3] else None
        return *found, of_sinks, None, None, None
