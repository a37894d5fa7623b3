"""Forward and backward kernels of RMSNorm over rows, with an optional residual addition."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first"])
def rms_norm_forward(
    first,
    X,
    RESIDUAL,
    W,
    Y,
    SUM,
    SCALE,
    rows,
    width,
    x_stride,
    residual_stride,
    eps,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalize ROWS rows; Y, SUM and SCALE are contiguous and SCALE (rows,) is 1 / rms."""
    row = (first + tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    x = tl.load(X + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)  # (ROWS, BLOCK)
    if ADD:
        residual = tl.load(RESIDUAL + row * residual_stride + column, mask=inside, other=0.0)
        # normalize the rounded sum: it is what later layers see
        rounded = (x + residual.to(tl.float32)).to(SUM.dtype.element_ty)
        tl.store(SUM + row * width + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1)[:, None] / width + eps)  # 1 / rms, (ROWS, 1)
    w = tl.load(W + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(SCALE + row, scale, mask=row < rows)
    tl.store(Y + row * width + column, (x * scale * w).to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first"])
def rms_norm_backward(
    first,
    DY,
    DSUM,
    X,
    W,
    SCALE,
    DX,
    DW,
    rows,
    width,
    dy_stride,
    dsum_stride,
    x_stride,
    rows_per_part,
    ADD: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute `rows_per_part` rows of DX and one row of partial sums DW (programs, width) float32.

    dx = r·w·g - x·r³·⟨w·g, x⟩ / width; with ADD the gradient DSUM of the sum is added.
    """
    part = (first + tl.program_id(0)).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    w = tl.load(W + column, mask=column < width, other=0.0).to(tl.float32)
    # summed over this program's rows; a second pass adds the programs
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for offset in tl.range(0, rows_per_part, ROWS, num_stages=STAGES):
        row = part * rows_per_part + offset + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < width)
        x = tl.load(X + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(DY + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(SCALE + row, mask=row < rows, other=0.0)
        x_hat = x * scale  # normalized row
        wg = w * g
        dx = (wg - x_hat * (tl.sum(x_hat * wg, 1)[:, None] / width)) * scale
        if ADD:
            dsum = tl.load(DSUM + row * dsum_stride + column, mask=inside, other=0.0)
            dx += dsum.to(tl.float32)
        tl.store(DX + row * width + column, dx.to(DX.dtype.element_ty), mask=inside)
        dw += g * x_hat
    total = tl.sum(dw, 0)[None, :]
    tl.store(DW + part * width + column, total, mask=column < width)
