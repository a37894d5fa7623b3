"""Forward and backward kernels of the causal convolution, over blocks of positions and channels."""

import triton
import triton.language as tl


@triton.jit
def _load(X, STATE, batch, place, column, positions, width, x_batch_stride, x_stride,
          K: tl.constexpr, GIVEN: tl.constexpr):  # fmt: skip
    """Load inputs at positions (BS, 1) of channels (1, BC); positions below 0 read STATE, or 0."""
    inside = (place >= 0) & (place < positions) & (column < width)
    x = tl.load(X + batch * x_batch_stride + place * x_stride + column, mask=inside, other=0.0)
    x = x.to(tl.float32)
    if GIVEN:
        before = (place < 0) & (place >= -K) & (column < width)
        at = (batch * K + K + place) * width + column
        x += tl.load(STATE + at, mask=before, other=0.0).to(tl.float32)
    return x


@triton.jit
def _joined(DOCUMENTS, batch, place, positions):
    """Return whether positions (BS, 1) are in the previous position's document; true for 0."""
    asked = (place > 0) & (place < positions)
    own = tl.load(DOCUMENTS + batch * positions + place, mask=asked, other=0)
    return own == tl.load(DOCUMENTS + batch * positions + place - 1, mask=asked, other=0)


@triton.jit
def _sums(X, W, BIAS, DOCUMENTS, STATE, batch, place, column, positions, width, x_batch_stride,
          x_stride, K: tl.constexpr, BIASED: tl.constexpr, CUT: tl.constexpr,
          GIVEN: tl.constexpr):  # fmt: skip
    """Return the float32 convolution at positions (BS, 1) of channels (1, BC)."""
    total = _load(X, STATE, batch, place, column, positions, width, x_batch_stride, x_stride, K,
                  GIVEN)  # fmt: skip
    total *= tl.load(W + column * K + K - 1, mask=column < width, other=0.0).to(tl.float32)
    seen = place < positions
    for distance in tl.static_range(1, K):
        if CUT:
            seen = seen & _joined(DOCUMENTS, batch, place - distance + 1, positions)
        x = _load(X, STATE, batch, place - distance, column, positions, width, x_batch_stride,
                  x_stride, K, GIVEN)  # fmt: skip
        w = tl.load(W + column * K + K - 1 - distance, mask=column < width, other=0.0)
        # Mask the product rather than x: a tap may be infinite.
        counted = seen
        if not GIVEN:
            counted = seen & (place >= distance)
        total += tl.where(counted, x * w.to(tl.float32), 0.0)
    if BIASED:
        total += tl.load(BIAS + column, mask=column < width, other=0.0).to(tl.float32)
    return total


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
    GIVEN: tl.constexpr,
    BS: tl.constexpr,
    BC: tl.constexpr,
):
    """Write BS positions of BC channels of Y, which is contiguous."""
    tile = first + tl.program_id(0)
    columns, rows = tl.cdiv(width, BC), tl.cdiv(positions, BS)
    column = (tile % columns) * BC + tl.arange(0, BC)[None, :]
    batch = (tile // columns // rows).to(tl.int64)
    place = (tile // columns % rows).to(tl.int64) * BS + tl.arange(0, BS)[:, None]
    total = _sums(X, W, BIAS, DOCUMENTS, STATE, batch, place, column, positions, width,
                  x_batch_stride, x_stride, K, BIASED, CUT, GIVEN)  # fmt: skip
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    inside = (place < positions) & (column < width)
    at = Y + (batch * positions + place) * width + column
    tl.store(at, total.to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first"])
def conv_pull(
    first,
    X,
    W,
    BIAS,
    DOCUMENTS,
    STATE,
    DY,
    PULL,
    positions,
    width,
    x_batch_stride,
    x_stride,
    K: tl.constexpr,
    SILU: tl.constexpr,
    BIASED: tl.constexpr,
    CUT: tl.constexpr,
    GIVEN: tl.constexpr,
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
    place = (tile // columns % rows).to(tl.int64) * BS + tl.arange(0, BS)[:, None]
    inside = (place < positions) & (column < width)
    at = (batch * positions + place) * width + column
    pull = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = _sums(X, W, BIAS, DOCUMENTS, STATE, batch, place, column, positions, width,
                      x_batch_stride, x_stride, K, BIASED, CUT, GIVEN)  # fmt: skip
        gate = 1.0 / (1.0 + tl.exp(-total))
        pull *= gate * (1.0 + total * (1.0 - gate))
    tl.store(PULL + at, pull, mask=inside)


@triton.jit(do_not_specialize=["first"])
def conv_backward(
    first,
    X,
    W,
    DOCUMENTS,
    STATE,
    PULL,
    DX,
    DSTATE,
    DW,
    positions,
    width,
    x_batch_stride,
    x_stride,
    K: tl.constexpr,
    CUT: tl.constexpr,
    GIVEN: tl.constexpr,
    BS: tl.constexpr,
    BC: tl.constexpr,
):
    """Write BS positions of BC channels of DX, and a partial DW (tiles of rows, K + 1, width).

    Positions start at -K; those below 0 are written to DSTATE. The last row of DW belongs to the
    bias. An input at s receives the gradient PULL of s + d if no document starts in between.
    """
    tile = first + tl.program_id(0)
    columns, rows = tl.cdiv(width, BC), tl.cdiv(positions + K, BS)
    column = (tile % columns) * BC + tl.arange(0, BC)[None, :]
    part = (tile // columns).to(tl.int64)
    batch = part // rows
    place = part % rows * BS + tl.arange(0, BS)[:, None] - K
    x = _load(X, STATE, batch, place, column, positions, width, x_batch_stride, x_stride, K,
              GIVEN)  # fmt: skip
    slope = tl.zeros([BS, BC], tl.float32)
    seen = place < positions
    for distance in tl.static_range(K):
        at = place + distance
        if CUT and distance > 0:
            seen = seen & _joined(DOCUMENTS, batch, at, positions)
        inside = seen & (at >= 0) & (at < positions) & (column < width)
        pull = tl.load(PULL + (batch * positions + at) * width + column, mask=inside, other=0.0)
        w = tl.load(W + column * K + K - 1 - distance, mask=column < width, other=0.0)
        slope += tl.where(inside, pull * w.to(tl.float32), 0.0)
        counted = inside
        if not GIVEN:
            counted = inside & (place >= 0)
        of_weight = tl.sum(tl.where(counted, x * pull, 0.0), 0)[None, :]
        row = DW + (part * (K + 1) + K - 1 - distance) * width + column
        tl.store(row, of_weight, mask=column < width)
        if distance == 0:
            total = tl.sum(pull, 0)[None, :]
            tl.store(DW + (part * (K + 1) + K) * width + column, total, mask=column < width)
    inside = (place >= 0) & (place < positions) & (column < width)
    at = DX + (batch * positions + place) * width + column
    tl.store(at, slope.to(DX.dtype.element_ty), mask=inside)
    if GIVEN:
        before = (place < 0) & (column < width)
        at = DSTATE + (batch * K + K + place) * width + column
        tl.store(at, slope.to(DSTATE.dtype.element_ty), mask=before)
