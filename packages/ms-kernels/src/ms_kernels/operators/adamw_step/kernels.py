"""Kernel of an in-place AdamW step in one pass over memory."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first"])
def adamw_step(
    first,
    WEIGHTS,
    GRADIENT,
    MEAN,
    SQUARE,
    count,
    mean_share,
    square_share,
    keep,
    rate,
    root_scale,
    eps,
    BLOCK: tl.constexpr,
):
    """Update BLOCK weights; all tensors are contiguous.

    `mean_share` is 1 - beta1, `square_share` is 1 - beta2, `keep` is 1 - learning rate · weight
    decay, `rate` is learning rate / (1 - beta1^step), and `root_scale` is (1 - beta2^step)^(-1/2).
    """
    place = (first + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    slope = tl.load(GRADIENT + place, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(MEAN + place, mask=inside, other=0.0)
    square = tl.load(SQUARE + place, mask=inside, other=0.0)
    weights = tl.load(WEIGHTS + place, mask=inside, other=0.0).to(tl.float32)
    # Not mean + share * (slope - mean): rounding would lose terms much smaller than the moment.
    mean = mean * (1.0 - mean_share) + mean_share * slope
    square = square * (1.0 - square_share) + square_share * (slope * slope)
    step = mean / (tl.sqrt_rn(square) * root_scale + eps)
    tl.store(MEAN + place, mean, mask=inside)
    tl.store(SQUARE + place, square, mask=inside)
    weights = weights * keep - rate * step
    tl.store(WEIGHTS + place, weights.to(WEIGHTS.dtype.element_ty), mask=inside)
