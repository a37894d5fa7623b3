"""Forward and backward kernels of LayerNorm over rows."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first"])
def layer_norm_forward(
    first,
    X,
    W,
    B,
    Y,
    MEAN,
    SCALE,
    rows,
    width,
    x_stride,
    eps,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalize ROWS rows; Y is contiguous, MEAN and SCALE (rows,) are the mean and 1 / std."""
    row = (first + tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    x = tl.load(X + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)  # (ROWS, BLOCK)
    mean = tl.sum(x, 1)[:, None] / width
    centered = tl.where(inside, x - mean, 0.0)  # padding must not add mean² to the variance
    # 1 / std, (ROWS, 1)
    scale = 1.0 / tl.sqrt_rn(tl.sum(centered * centered, 1)[:, None] / width + eps)
    w = tl.load(W + column, mask=column < width, other=0.0).to(tl.float32)
    y = centered * scale * w
    if BIAS:
        y += tl.load(B + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(MEAN + row, mean, mask=row < rows)
    tl.store(SCALE + row, scale, mask=row < rows)
    tl.store(Y + row * width + column, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first"])
def layer_norm_backward(
    first,
    DY,
    X,
    W,
    MEAN,
    SCALE,
    DX,
    DW,
    DB,
    rows,
    width,
    dy_stride,
    x_stride,
    rows_per_part,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute `rows_per_part` rows of DX, and one row each of DW and DB (programs, width) float32.

    With n = (x - mean)·r: dx = r·(w·g - mean(w·g) - n·mean(n·w·g)).
    """
    part = (first + tl.program_id(0)).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    w = tl.load(W + column, mask=column < width, other=0.0).to(tl.float32)
    # Partial sums over this program's rows; a second pass adds the programs.
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    for offset in tl.range(0, rows_per_part, ROWS, num_stages=STAGES):
        row = part * rows_per_part + offset + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < width)
        x = tl.load(X + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(DY + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(MEAN + row, mask=row < rows, other=0.0)
        scale = tl.load(SCALE + row, mask=row < rows, other=0.0)
        x_hat = tl.where(inside, (x - mean) * scale, 0.0)  # normalized row
        wg = w * g
        along = tl.sum(x_hat * wg, 1)[:, None] / width  # mean(n · w · g), (ROWS, 1)
        dx = (wg - tl.sum(wg, 1)[:, None] / width - x_hat * along) * scale
        tl.store(DX + row * width + column, dx.to(DX.dtype.element_ty), mask=inside)
        dw += g * x_hat
        db += g
    at = part * width + column
    tl.store(DW + at, tl.sum(dw, 0)[None, :], mask=column < width)
    tl.store(DB + at, tl.sum(db, 0)[None, :], mask=column < width)
