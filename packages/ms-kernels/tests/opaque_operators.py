"""Numpy operators, opaque to torch, registered as torch operators by `opaque`."""

import numpy
import torch
from torch import Tensor

from ms_kernels.core.plan import absent_grad, needs_grad
from ms_kernels.core.torch_operator import opaque
from ms_kernels.operators import CONTRACTS
from ms_kernels.operators.attention.contract import visible

__all__ = ["add_rms_norm", "attention", "rms_norm"]


def _array(tensor):
    # A copy: numpy would pin the storage, which FSDP frees between uses.
    return tensor.detach().float().clone().numpy()


def _new(values, like):
    return torch.from_numpy(numpy.ascontiguousarray(values)).to(like.dtype)


def _rms_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    values = _array(x)
    scale = 1 / numpy.sqrt((values**2).mean(-1) + eps)
    result = values * scale[..., None] * _array(weight)
    return _new(result, x), torch.from_numpy(numpy.asarray(scale, dtype=numpy.float32))


def _rms_fake(x, weight, eps):
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    return result, x.new_empty(x.shape[:-1], dtype=torch.float32)


def _rms_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, grad_mask: int, eps: float
) -> tuple[Tensor, Tensor]:
    values, grad_out, r = _array(x), _array(grad), _array(scale)[..., None]
    grad_x, grad_weight = absent_grad(x), absent_grad(weight)
    if needs_grad(grad_mask, 0):
        projection = (grad_out * _array(weight) * values).mean(-1, keepdims=True)
        grad_x = _new(r * grad_out * _array(weight) - r**3 * values * projection, x)
    if needs_grad(grad_mask, 1):
        parts = (grad_out * values * r).reshape(-1, values.shape[-1])
        grad_weight = _new(parts.sum(0), weight)
    return grad_x, grad_weight


rms_norm = opaque(
    CONTRACTS["rms_norm"],
    "numpy",
    forward=_rms_forward,
    fake=_rms_fake,
    intermediates={"scale": "..."},
    backward=_rms_backward,
    saves=("x", "weight", "scale"),
)


def _add_forward(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    summed = (x + residual).contiguous()
    result, scale = _rms_forward(summed, weight, eps)
    return result, summed, scale


def _add_fake(x, residual, weight, eps):
    result, scale = _rms_fake(x, weight, eps)
    return result, torch.empty_like(result), scale


def _add_backward(
    grad: Tensor,
    grad_summed: Tensor | None,
    summed: Tensor,
    weight: Tensor,
    scale: Tensor,
    grad_mask: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_weight = _rms_backward(grad, summed, weight, scale, 1 | (grad_mask >> 1), eps)
    grad_x = grad_x if grad_summed is None else grad_x + grad_summed
    second = grad_x.clone() if needs_grad(grad_mask, 1) else absent_grad(grad_x)
    return grad_x if needs_grad(grad_mask, 0) else absent_grad(grad_x), second, grad_weight


add_rms_norm = opaque(
    CONTRACTS["add_rms_norm"],
    "numpy",
    forward=_add_forward,
    fake=_add_fake,
    intermediates={"scale": "..."},
    backward=_add_backward,
    saves=("summed", "weight", "scale"),
)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> Tensor:
    with torch.no_grad():
        qkv = [torch.from_numpy(_array(tensor)) for tensor in (q, k, v)]
        sink_values = None if sinks is None else torch.from_numpy(_array(sinks))
        result = CONTRACTS["attention"].reference(
            *qkv, documents, sink_values, causal, window, scale
        )
    return _new(result.numpy(), q)


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    grad_mask: int,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # Autograd does not record below this level, so the derivative is written out.
    kv_heads = k.shape[2]
    q_array, grad_out = (
        _array(tensor).reshape(*q.shape[:2], kv_heads, -1, tensor.shape[-1]) for tensor in (q, grad)
    )
    k_array, v_array = _array(k), _array(v)
    scale_factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = numpy.einsum("bqgrd,bkgd->bgrqk", q_array, k_array) * scale_factor
    mask = visible(q.shape[1], k.shape[1], q.device, documents, causal, window)
    if mask is not None:
        scores = numpy.where(mask.numpy()[:, None, None], scores, -numpy.inf)
    sink = numpy.full((kv_heads, scores.shape[2], 1, 1), -numpy.inf, dtype=scores.dtype)
    if sinks is not None:
        sink = _array(sinks).reshape(sink.shape)
    row_max = numpy.maximum(scores.max(-1, keepdims=True), sink)
    p, sink_p = numpy.exp(scores - row_max), numpy.exp(sink - row_max)
    denominator = p.sum(-1, keepdims=True) + sink_p
    p, sink_p = p / denominator, sink_p / denominator
    ds = numpy.einsum("bqgrd,bkgd->bgrqk", grad_out, v_array)
    delta = (p * ds).sum(-1, keepdims=True)
    ds = p * (ds - delta) * scale_factor
    grads = (
        numpy.einsum("bgrqk,bkgd->bqgrd", ds, k_array).reshape(q.shape),
        numpy.einsum("bgrqk,bqgrd->bkgd", ds, q_array),
        numpy.einsum("bgrqk,bqgrd->bkgd", p, grad_out),
        -(sink_p * delta).sum((0, 3, 4)).reshape(-1),
    )
    return tuple(
        _new(grad_array, q) if needs_grad(grad_mask, index) else absent_grad(like)
        for index, (grad_array, like) in enumerate(
            zip(grads, (q, k, v, q[0, 0, :, 0]), strict=True)
        )
    )


attention = opaque(
    CONTRACTS["attention"],
    "numpy",
    forward=_attend,
    backward=_attend_backward,
    saves=("q", "k", "v", "documents", "sinks"),
)
