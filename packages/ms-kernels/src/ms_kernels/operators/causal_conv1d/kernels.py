"""Forward and backward kernels of the causal convolution, over blocks of positions and channels."""

import triton
import triton.language as tl


@triton.jit
def _load(X, STATE, batch, pos, column, positions, width, x_batch_stride, x_stride,
          K: tl.constexpr, HAS_STATE: tl.constexpr):  # fmt: skip
    """Load inputs at positions (BS, 1) of channels (1, BC); positions below 0 read STATE, or 0."""
    inside = (pos >= 0) & (pos < positions) & (column < width)  # (BS, BC)
    x = tl.load(X + batch * x_batch_stride + pos * x_stride + column, mask=inside, other=0.0)
    x = x.to(tl.float32)
    if HAS_STATE:
        before = (pos < 0) & (pos >= -K) & (column < width)
        # STATE is (batch, K, width); position -1 is its last row
        at = (batch * K + K + pos) * width + column
        x += tl.load(STATE + at, mask=before, other=0.0).to(tl.float32)
    return x


@triton.jit
def _same_document(DOCUMENTS, batch, pos, positions):
    """Return whether positions (BS, 1) are in the previous position's document; true for 0."""
    has_previous = (pos > 0) & (pos < positions)  # (BS, 1)
    doc = tl.load(DOCUMENTS + batch * positions + pos, mask=has_previous, other=0)
    return doc == tl.load(DOCUMENTS + batch * positions + pos - 1, mask=has_previous, other=0)


@triton.jit
def _sums(X, W, BIAS, DOCUMENTS, STATE, batch, pos, column, positions, width, x_batch_stride,
          x_stride, K: tl.constexpr, BIASED: tl.constexpr, CUT: tl.constexpr,
          HAS_STATE: tl.constexpr):  # fmt: skip
    """Return the float32 convolution at positions (BS, 1) of channels (1, BC)."""
    acc = _load(X, STATE, batch, pos, column, positions, width, x_batch_stride, x_stride, K,
                  HAS_STATE)  # fmt: skip
    acc *= tl.load(W + column * K + K - 1, mask=column < width, other=0.0).to(tl.float32)
    # A tap counts only if no document starts between it and the output position.
    visible = pos < positions
    for distance in tl.static_range(1, K):
        if CUT:
            visible = visible & _same_document(DOCUMENTS, batch, pos - distance + 1, positions)
        x = _load(X, STATE, batch, pos - distance, column, positions, width, x_batch_stride,
                  x_stride, K, HAS_STATE)  # fmt: skip
        w = tl.load(W + column * K + K - 1 - distance, mask=column < width, other=0.0)
        # Mask the product rather than x: a tap may be infinite.
        valid = visible
        if not HAS_STATE:
            valid = visible & (pos >= distance)
        acc += tl.where(valid, x * w.to(tl.float32), 0.0)
    if BIASED:
        acc += tl.load(BIAS + column, mask=column < width, other=0.0).to(tl.float32)
    return acc


@triton.jit(do_not_specialize=["first"])
def conv_forward(
    first,
    X,
    W,
    BIAS,
    DOCUMENTS,
    STATE,
    Y,
    positions,
    width,
    x_batch_stride,
    x_stride,
    K: tl.constexpr,
    SILU: tl.constexpr,
    BIASED: tl.constexpr,
    CUT: tl.constexpr,
    HAS_STATE: tl.constexpr,
    BS: tl.constexpr,
    BC: tl.constexpr,
):
    """Write BS positions of BC channels of Y, which is contiguous."""
    tile = first + tl.program_id(0)
    # Programs are ordered batch, block of positions, block of channels (fastest).
    columns, rows = tl.cdiv(width, BC), tl.cdiv(positions, BS)
    column = (tile % columns) * BC + tl.arange(0, BC)[None, :]
    batch = (tile // columns // rows).to(tl.int64)
    pos = (tile // columns % rows).to(tl.int64) * BS + tl.arange(0, BS)[:, None]
    # Recompute the sums instead of saving them: K loads per element are cheaper than a tensor.
    acc = _sums(X, W, BIAS, DOCUMENTS, STATE, batch, pos, column, positions, width,
                  x_batch_stride, x_stride, K, BIASED, CUT, HAS_STATE)  # fmt: skip
    if SILU:
        acc = acc / (1.0 + tl.exp(-acc))  # SiLU
    inside = (pos < positions) & (column < width)
    at = Y + (batch * positions + pos) * width + column
    tl.store(at, acc.to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first"])
def conv_silu_backward(
    first,
    X,
    W,
    BIAS,
    DOCUMENTS,
    STATE,
    DY,
    DSUM,
    positions,
    width,
    x_batch_stride,
    x_stride,
    K: tl.constexpr,
    SILU: tl.constexpr,
    BIASED: tl.constexpr,
    CUT: tl.constexpr,
    HAS_STATE: tl.constexpr,
    BS: tl.constexpr,
    BC: tl.constexpr,
):
    """Write the float32 gradient of the sums, back-propagated through SiLU.

    d silu(t) = gate · (1 + t · (1 - gate)), where gate = 1 / (1 + exp(-t))
    """
    tile = first + tl.program_id(0)
    columns, rows = tl.cdiv(width, BC), tl.cdiv(positions, BS)
    column = (tile % columns) * BC + tl.arange(0, BC)[None, :]
    batch = (tile // columns // rows).to(tl.int64)
    pos = (tile // columns % rows).to(tl.int64) * BS + tl.arange(0, BS)[:, None]
    inside = (pos < positions) & (column < width)
    at = (batch * positions + pos) * width + column
    dsum = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        # Recompute the sums instead of saving them: K loads per element are cheaper than a tensor.
        acc = _sums(X, W, BIAS, DOCUMENTS, STATE, batch, pos, column, positions, width,
                      x_batch_stride, x_stride, K, BIASED, CUT, HAS_STATE)  # fmt: skip
        gate = 1.0 / (1.0 + tl.exp(-acc))
        dsum *= gate * (1.0 + acc * (1.0 - gate))
    tl.store(DSUM + at, dsum, mask=inside)


@triton.jit(do_not_specialize=["first"])
def conv_backward(
    first,
    X,
    W,
    DOCUMENTS,
    STATE,
    DSUM,
    DX,
    DSTATE,
    DW,
    positions,
    width,
    x_batch_stride,
    x_stride,
    K: tl.constexpr,
    CUT: tl.constexpr,
    HAS_STATE: tl.constexpr,
    BS: tl.constexpr,
    BC: tl.constexpr,
):
    """Write BS positions of BC channels of DX, and a partial DW (tiles of rows, K + 1, width).

    Positions start at -K; those below 0 are written to DSTATE. The last row of DW belongs to the
    bias. An input at s receives the gradient DSUM of s + d if no document starts in between.
    """
    tile = first + tl.program_id(0)
    columns, rows = tl.cdiv(width, BC), tl.cdiv(positions + K, BS)
    column = (tile % columns) * BC + tl.arange(0, BC)[None, :]
    part = (tile // columns).to(tl.int64)
    batch = part // rows
    pos = part % rows * BS + tl.arange(0, BS)[:, None] - K
    x = _load(X, STATE, batch, pos, column, positions, width, x_batch_stride, x_stride, K,
              HAS_STATE)  # fmt: skip
    # x[s] meets y[s + d] at tap K - 1 - d, so dx and dW come from one loop over d.
    dx = tl.zeros([BS, BC], tl.float32)
    visible = pos < positions
    for distance in tl.static_range(K):
        at = pos + distance
        if CUT and distance > 0:
            visible = visible & _same_document(DOCUMENTS, batch, at, positions)
        inside = visible & (at >= 0) & (at < positions) & (column < width)
        dsum = tl.load(DSUM + (batch * positions + at) * width + column, mask=inside, other=0.0)
        w = tl.load(W + column * K + K - 1 - distance, mask=column < width, other=0.0)
        dx += tl.where(inside, dsum * w.to(tl.float32), 0.0)
        valid = inside
        if not HAS_STATE:
            valid = inside & (pos >= 0)
        dw = tl.sum(tl.where(valid, x * dsum, 0.0), 0)[None, :]  # (1, BC)
        row = DW + (part * (K + 1) + K - 1 - distance) * width + column
        tl.store(row, dw, mask=column < width)
        # The bias receives every position of the block exactly once.
        if distance == 0:
            acc = tl.sum(dsum, 0)[None, :]
            tl.store(DW + (part * (K + 1) + K) * width + column, acc, mask=column < width)
    inside = (pos >= 0) & (pos < positions) & (column < width)  # (BS, BC)
    at = DX + (batch * positions + pos) * width + column
    tl.store(at, dx.to(DX.dtype.element_ty), mask=inside)
    if HAS_STATE:
        before = (pos < 0) & (column < width)
        at = DSTATE + (batch * K + K + pos) * width + column
        tl.store(at, dx.to(DSTATE.dtype.element_ty), mask=before)
