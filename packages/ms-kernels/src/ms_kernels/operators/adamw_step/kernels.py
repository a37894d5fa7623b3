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
    index = (first + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    grad = tl.load(GRADIENT + index, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(MEAN + index, mask=inside, other=0.0)
    square = tl.load(SQUARE + index, mask=inside, other=0.0)
    weights = tl.load(WEIGHTS + index, mask=inside, other=0.0).to(tl.float32)
    # Not mean + share * (grad - mean): rounding would lose terms much smaller than the moment.
    mean = mean * (1.0 - mean_share) + mean_share * grad
    square = square * (1.0 - square_share) + square_share * (grad * grad)
    # bias corrections are folded into rate and root_scale
    step = mean / (tl.sqrt_rn(square) * root_scale + eps)
    tl.store(MEAN + index, mean, mask=inside)
    tl.store(SQUARE + index, square, mask=inside)
    weights = weights * keep - rate * step  # decoupled weight decay, as in the paper
    tl.store(WEIGHTS + index, weights.to(WEIGHTS.dtype.element_ty), mask=inside)
