"""Backward kernel of the weighted sums: scatters each token's gradient to its rows."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first"])
def scatter_choice(
    first,
    DY,
    X,
    PLACES,
    W,
    DX,
    DW,
    rows,
    choices,
    width,
    dy_stride,
    stride,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write row PLACES[t, c] of DX, which no other choice writes, and DW[t, c] = ⟨DY[t], X⟩.

    An entry outside the `rows` is neither written nor read, and makes DW[t, c] NaN.
    """
    choice = (first + tl.program_id(0)).to(tl.int64)
    token = choice // choices
    row = tl.load(PLACES + choice).to(tl.int64)
    fits = (row >= 0) & (row < rows)
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(W + choice).to(tl.float32)
    dot = tl.zeros([BLOCK], tl.float32)  # partial dot product, reduced once at the end
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        # gradient of the token, shared by its choices
        g = tl.load(DY + token * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        dx = (g * weight).to(DX.dtype.element_ty)
        in_row = column < tl.where(fits, width, 0)
        tl.store(DX + row * width + column, dx, mask=in_row)
        if WEIGHTED:
            x = tl.load(X + row * stride + column, mask=in_row, other=0.0).to(tl.float32)
            dot += g * x
    if WEIGHTED:
        dw = tl.where(fits, tl.sum(dot, 0), float("nan"))
        tl.store(DW + choice, dw.to(DW.dtype.element_ty))
