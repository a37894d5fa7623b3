"""Kernel that scales float32 gradient sums and casts them to the dtype of their tensors."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first"])
def scale_cast(first, X, FACTOR, Y, count, factor, BLOCK: tl.constexpr):
    """Write X · FACTOR[0] · factor in Y's dtype in one pass; X and Y are contiguous."""
    index = (first + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    x = tl.load(X + index, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(FACTOR).to(tl.float32) * factor
    tl.store(Y + index, (x * scale).to(Y.dtype.element_ty), mask=inside)
