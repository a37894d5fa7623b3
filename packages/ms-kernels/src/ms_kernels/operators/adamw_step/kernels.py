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
    mean_weight,
    square_weight,
    decay_factor,
    step_size,
    root_scale,
    eps,
    BLOCK: tl.constexpr,
):
    """Update BLOCK weights; all tensors are contiguous.

    `mean_weight` is 1 - beta1, `square_weight` is 1 - beta2, `decay_factor` is 1 - learning rate ·
    weight decay, `step_size` is learning rate / (1 - beta1^step), and `root_scale` is
    (1 - beta2^step)^(-1/2).
    """
    index = (first + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    grad = tl.load(GRADIENT + index, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(MEAN + index, mask=inside, other=0.0)
    square = tl.load(SQUARE + index, mask=inside, other=0.0)
    weights = tl.load(WEIGHTS + index, mask=inside, other=0.0).to(tl.float32)
    # Not mean + mean_weight * (grad - mean): rounding loses terms much smaller than the moment.
    mean = mean * (1.0 - mean_weight) + mean_weight * grad
    square = square * (1.0 - square_weight) + square_weight * (grad * grad)
    # bias corrections are folded into step_size and root_scale
    step = mean / (tl.sqrt_rn(square) * root_scale + eps)
    tl.store(MEAN + index, mean, mask=inside)
    tl.store(SQUARE + index, square, mask=inside)
    weights = weights * decay_factor - step_size * step  # decoupled weight decay, as in the paper
    tl.store(WEIGHTS + index, weights.to(WEIGHTS.dtype.element_ty), mask=inside)
