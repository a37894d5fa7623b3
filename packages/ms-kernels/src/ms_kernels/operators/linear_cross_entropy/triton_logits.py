"""Logits computed in chunks of rows, and float32 sums of their half-precision gradients.

Products of half-precision matrices are accumulated and returned in float32.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ms_kernels.backends.triton.configuration import grid, tuned_kernels
from ms_kernels.backends.triton.launching import blocks, launch
from ms_kernels.core.launches import ANY_SIZE, TunedKernel, key_of
from ms_kernels.core.plan import absent_grad

CHUNK_BYTES = 2**31
"""Size of a chunk's float32 logits. Each chunk reads and writes the full weight gradient: on an
H200 (4.3 TB/s, 780 TFLOP/s) 240 / R of the time of a chunk of R rows, 6% at 4,096 rows."""

GRADIENT_SCALE = {torch.float16: 2.0**13}
"""Scale of a chunk's gradient by dtype: a probability of 1e-5 would be subnormal in float16."""

WIDENING = frozenset({"cuda"})
"""Device types whose matrix library returns float32 products of half-precision matrices."""

SCALE_CAST = f"{__package__}.kernels.scale_cast"


def scale_kernel(operator: str) -> TunedKernel:
    """Return the kernel that scales and casts an operator's gradient sums."""
    (kernel,) = tuned_kernels(
        operator,
        "scale_cast",
        tried_at=({"...": 4096, "V": 128256, "H": 1024},),
        candidates=grid(BLOCK=(1024, 2048, 4096), num_warps=(4, 8)),
        defaults=((ANY_SIZE, {"BLOCK": 2048, "num_warps": 4}),),
    )
    return kernel


def product(x: Tensor, y: Tensor, out: Tensor) -> None:
    """Write ``x @ y`` into `out`, which is float32."""
    if x.dtype != torch.float32 and x.device.type in WIDENING:
        torch.mm(x, y, out_dtype=torch.float32, out=out)
    else:
        torch.mm(x.to(torch.float32), y.to(torch.float32), out=out)


def add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Add ``x @ y`` to `total`, which is float32."""
    if x.dtype != torch.float32 and x.device.type in WIDENING:
        torch.addmm(total, x, y, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(x.to(torch.float32), y.to(torch.float32))


def chunks(
    hidden: Tensor, weight: Tensor, *, gradients: bool = False
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield row slices of hidden (N, H), their float32 logits (R, V) and a gradient buffer (R, V).

    A chunk has at most `CHUNK_BYTES` of logits. All chunks share their memory, so
    the tensors are valid only until the next iteration.

    Args:
        hidden: (N, H).
        weight: (V, H).
        gradients: the caller writes the gradient of the logits, in the dtype of hidden. The buffer
            is separate unless that is float32; otherwise the third item is the logits tensor.
    """
    step = max(CHUNK_BYTES // (4 * weight.shape[0]), 1)  # rows of a chunk, 4 bytes per logit
    shape = min(step, len(hidden)), len(weight)
    buffer = hidden.new_empty(shape, dtype=torch.float32)
    needs_buffer = gradients and hidden.dtype != torch.float32
    grad_buffer = hidden.new_empty(shape) if needs_buffer else buffer
    for start in range(0, len(hidden), step):
        rows = slice(start, start + step)
        chunk = hidden[rows]
        # (R, H) @ (H, V) -> (R, V), float32.
        product(chunk, weight.T, buffer[: len(chunk)])
        yield rows, buffer[: len(chunk)], grad_buffer[: len(chunk)]


def gradient_scale(dtype: torch.dtype) -> float:
    """Return the scale of a chunk's stored gradient."""
    return GRADIENT_SCALE.get(dtype, 1.0)


def normalize_row_grads(
    dtype: torch.dtype, *row_grads: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Divide row gradients by a common factor and scale them; return the factor and the gradients.

    In float16 the factor is the largest absolute value, so a loss scale cannot cause overflow. In
    other dtypes the factor is 1 and the gradients are returned unchanged.
    """
    if dtype not in GRADIENT_SCALE or not row_grads[0].numel():
        return row_grads[0].new_ones(()), row_grads
    peak = torch.stack([slope.abs().amax() for slope in row_grads]).amax()
    peak = peak.clamp(min=torch.finfo(torch.float32).tiny)  # all may be 0
    return peak, tuple(slope / peak * GRADIENT_SCALE[dtype] for slope in row_grads)


class TritonGradientSums:
    """Gradients of hidden (N, H) and weight (V, H), summed in float32; None where not needed."""

    def __init__(self, hidden: Tensor, weight: Tensor, *, of_hidden: bool, of_weight: bool) -> None:
        # Each row of hidden is in one chunk, while every chunk adds to the weight's gradient.
        self.hidden = hidden.new_empty(hidden.shape, dtype=torch.float32) if of_hidden else None
        self.weight = weight.new_zeros(weight.shape, dtype=torch.float32) if of_weight else None

    def add(self, gradient: Tensor, hidden: Tensor, weight: Tensor, rows: slice) -> None:
        """Add the contribution of one chunk's gradient (R, V), in the dtype of the inputs."""
        if self.hidden is not None:
            product(gradient, weight, self.hidden[rows])
        if self.weight is not None:
            add_product(self.weight, gradient.T, hidden[rows])

    def scaled(
        self, kernel: TunedKernel, slope: Tensor, hidden: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return both gradients times `slope`, in the shapes and dtypes of hidden and weight."""
        return scale_and_cast(kernel, self.hidden, slope, hidden), scale_and_cast(
            kernel, self.weight, slope, weight
        )


def scale_and_cast(kernel: TunedKernel, x: Tensor | None, slope: Tensor, like: Tensor) -> Tensor:
    """Return ``x · slope`` with the gradient scale removed, in the shape and dtype of `like`.

    Args:
        kernel: the operator's kernel, from `scale_kernel`.
        x: contiguous, float32; None for a gradient that is not needed.
        slope: scalar tensor on the device.
        like: tensor of the inputs' dtype, which determines the gradient scale of x.
    """
    if x is None:
        return absent_grad(like)
    result = torch.empty_like(like, memory_format=torch.contiguous_format)
    constants = kernel.values(key_of(like))
    launch(
        SCALE_CAST,
        blocks(x.numel(), constants["BLOCK"]),
        x,
        *(x, slope, result, x.numel(), 1 / gradient_scale(like.dtype)),
        **constants,
    )
    return result
