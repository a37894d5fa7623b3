"""Kernels that gather rows in a given order, and compute weighted sums of each token's rows."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first"])
def gather_rows(first, X, ORDER, OUT, rows, choices, width, stride, BLOCK: tl.constexpr):
    """Copy BLOCK columns of row ORDER[r] // choices of X to row r of OUT, which is contiguous."""
    tile = first + tl.program_id(0)
    blocks = tl.cdiv(width, BLOCK)
    row = (tile // blocks).to(tl.int64)
    column = (tile % blocks) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(ORDER + row).to(tl.int64) // choices  # each token is repeated once per choice
    x = tl.load(X + source * stride + column, mask=column < width)
    tl.store(OUT + row * width + column, x, mask=column < width)


@triton.jit(do_not_specialize=["first"])
def sum_choices(
    first,
    X,
    PLACES,
    W,
    OUT,
    rows,
    choices,
    width,
    stride,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK columns of OUT[t] = Σ_c W[t, c] · X[PLACES[t, c]].

    An entry outside the `rows` of X is not read and makes OUT[t] NaN.
    """
    tile = first + tl.program_id(0)
    blocks = tl.cdiv(width, BLOCK)
    token = (tile // blocks).to(tl.int64)
    column = (tile % blocks) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)  # float32 sum over the choices
    for choice in range(choices):
        source = tl.load(PLACES + token * choices + choice).to(tl.int64)
        # NaN instead of an out-of-bounds read
        read = column < tl.where((source >= 0) & (source < rows), width, 0)
        x = tl.load(X + source * stride + column, mask=read, other=float("nan")).to(tl.float32)
        if WEIGHTED:
            x *= tl.load(W + token * choices + choice).to(tl.float32)
        acc += x
    tl.store(OUT + token * width + column, acc.to(OUT.dtype.element_ty), mask=column < width)
