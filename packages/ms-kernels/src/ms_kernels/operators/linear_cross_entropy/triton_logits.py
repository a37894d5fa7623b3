"""Logits of a few rows at a time, and what their half-precision gradients add up to.

Products of half-precision matrices stay in float32.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ms_kernels.backends.triton.configuration import grid, tuned_kernels
from ms_kernels.backends.triton.launching import blocks, launch
from ms_kernels.core.launches import ANY_SIZE, TunedKernel, key_of
from ms_kernels.core.plan import absent_grad

CHUNK_BYTES = 2**31
"""Size of a chunk's float32 logits. Each chunk reads and writes the weight's whole gradient, which
costs 240 / R of a chunk of R rows on an H200 (4.3 TB/s, 780 TFLOP/s): 6% at 4,096 rows."""

LIFT = {torch.float16: 2.0**13}
"""Factor of a chunk's gradient by dtype: a probability of 1e-5 would be subnormal in float16."""

WIDENING = frozenset({"cuda"})
"""Device types whose matrix library sums and returns float32 from half-precision factors."""

SCALE_CAST = f"{__package__}.kernels.scale_cast"


def scale_kernel(operator: str) -> TunedKernel:
    """Return the kernel that scales and rounds an operator's sums."""
    (kernel,) = tuned_kernels(
        operator,
        "scale_cast",
        tried_at=({"...": 4096, "V": 128256, "H": 1024},),
        candidates=grid(BLOCK=(1024, 2048, 4096), num_warps=(4, 8)),
        defaults=((ANY_SIZE, {"BLOCK": 2048, "num_warps": 4}),),
    )
    return kernel


def product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write ``left @ right`` into `out`, which is float32."""
    if left.dtype != torch.float32 and left.device.type in WIDENING:
        torch.mm(left, right, out_dtype=torch.float32, out=out)
    else:
        torch.mm(left.to(torch.float32), right.to(torch.float32), out=out)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to `total`, which is float32."""
    if left.dtype != torch.float32 and left.device.type in WIDENING:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.to(torch.float32), right.to(torch.float32))


def chunks(
    hidden: Tensor, weight: Tensor, *, gradients: bool = False
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield rows of hidden (N, H), their float32 logits (R, V) and room for their gradient.

    A chunk has as many rows as `CHUNK_BYTES` of logits hold. Every chunk uses the same memory, so
    its tensors are only valid until the next one is asked for.

    Args:
        hidden: (N, H).
        weight: (V, H).
        gradients: whether the caller writes the gradient of the logits, in the dtype of hidden.
            In float32 it takes the place of the logits. Without it the third item is the logits.
    """
    step = max(CHUNK_BYTES // (4 * weight.shape[0]), 1)
    shape = min(step, len(hidden)), len(weight)
    buffer = hidden.new_empty(shape, dtype=torch.float32)
    apart = gradients and hidden.dtype != torch.float32
    room = hidden.new_empty(shape) if apart else buffer
    for start in range(0, len(hidden), step):
        rows = slice(start, start + step)
        chunk = hidden[rows]
        product(chunk, weight.T, buffer[: len(chunk)])
        yield rows, buffer[: len(chunk)], room[: len(chunk)]


def lift_of(dtype: torch.dtype) -> float:
    """Return the factor under which a chunk's gradient is held."""
    return LIFT.get(dtype, 1.0)


def lifted(dtype: torch.dtype, *slopes: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a factor of the rows' gradients, and the gradients divided by it and lifted.

    In float16 the factor is the largest of them, so that a loss scale cannot make one overflow; in
    other dtypes it is 1 and nothing is lifted.
    """
    if dtype not in LIFT or not slopes[0].numel():
        return slopes[0].new_ones(()), slopes
    peak = torch.stack([each.abs().amax() for each in slopes]).amax()
    peak = peak.clamp(min=torch.finfo(torch.float32).tiny)
    return peak, tuple(each / peak * LIFT[dtype] for each in slopes)


class Sums:
    """Gradients of hidden (N, H) and weight (V, H), summed in float32, each None if not wanted."""

    def __init__(self, hidden: Tensor, weight: Tensor, *, of_hidden: bool, of_weight: bool) -> None:
        self.hidden = hidden.new_empty(hidden.shape, dtype=torch.float32) if of_hidden else None
        self.weight = weight.new_zeros(weight.shape, dtype=torch.float32) if of_weight else None

    def add(self, gradient: Tensor, hidden: Tensor, weight: Tensor, rows: slice) -> None:
        """Spend one chunk's gradient (R, V), of the inputs' dtype."""
        if self.hidden is not None:
            product(gradient, weight, self.hidden[rows])
        if self.weight is not None:
            add_product(self.weight, gradient.T, hidden[rows])

    def scaled(
        self, kernel: TunedKernel, slope: Tensor, hidden: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return both times `slope`, in the shapes and dtypes of hidden and weight."""
        return scaled(kernel, self.hidden, slope, hidden), scaled(
            kernel, self.weight, slope, weight
        )


def scaled(kernel: TunedKernel, x: Tensor | None, slope: Tensor, like: Tensor) -> Tensor:
    """Return ``x · slope``, undoing the lift, in the shape and dtype of `like`.

    Args:
        kernel: that of the operator, as `scale_kernel` gives it.
        x: contiguous, float32; None for a gradient that is not wanted.
        slope: one number, on the device.
        like: of the inputs' dtype, by which x was lifted.
    """
    if x is None:
        return absent_grad(like)
    result = torch.empty_like(like, memory_format=torch.contiguous_format)
    constants = kernel.values(key_of(like))
    launch(
        SCALE_CAST,
        blocks(x.numel(), constants["BLOCK"]),
        x,
        *(x, slope, result, x.numel(), 1 / lift_of(like.dtype)),
        **constants,
    )
    return result
