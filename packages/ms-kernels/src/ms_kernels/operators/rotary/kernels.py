"""Rotary embedding of queries and keys in one launch; its gradient is the inverse rotation."""

import triton
import triton.language as tl


@triton.jit
def _rotate(
    X,
    OUT,
    cos,
    sin,
    head,
    heads,
    head_stride,
    half,
    width,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    PASSTHROUGH: tl.constexpr,
):
    """Rotate heads `head` (HEADS, 1) of one position from X (strided heads) to OUT (contiguous)."""
    X += head * head_stride
    OUT += head * width
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF)[None, :]
        inside = (head < heads) & (column < 2 * half)
        pairs = tl.load(X + column, mask=inside, other=0.0).to(tl.float32)  # (HEADS, 2 · HALF)
        x1, x2 = tl.split(tl.reshape(pairs, [pairs.shape[0], HALF, 2]))
        rotated = tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin)
        rotated = tl.reshape(rotated, [pairs.shape[0], 2 * HALF])
        tl.store(OUT + column, rotated.to(OUT.dtype.element_ty), mask=inside)
    else:
        column = tl.arange(0, HALF)[None, :]
        inside = (head < heads) & (column < half)
        x1 = tl.load(X + column, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(X + column + half, mask=inside, other=0.0).to(tl.float32)
        y1 = x1 * cos - x2 * sin
        y2 = x2 * cos + x1 * sin
        tl.store(OUT + column, y1.to(OUT.dtype.element_ty), mask=inside)
        tl.store(OUT + column + half, y2.to(OUT.dtype.element_ty), mask=inside)
    # Features beyond the rotated width pass through unchanged.
    if PASSTHROUGH > 0:
        column = 2 * half + tl.arange(0, PASSTHROUGH)[None, :]
        inside = (head < heads) & (column < width)
        tl.store(OUT + column, tl.load(X + column, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["first"])
def rotate_heads(
    first,
    Q,
    K,
    Q_OUT,
    K_OUT,
    COS,
    SIN,
    positions,
    q_heads,
    k_heads,
    half,
    width,
    q_batch_stride,
    q_stride,
    q_head_stride,
    k_batch_stride,
    k_stride,
    k_head_stride,
    angle_batch_stride,
    angle_stride,
    INVERSE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PASSTHROUGH: tl.constexpr,
):
    """Rotate HEADS heads of one position of Q or K; INVERSE rotates in the inverse direction.

    Results are contiguous (batch, positions, heads, width); COS and SIN have the same strides.
    """
    tile = first + tl.program_id(0)
    q_blocks = tl.cdiv(q_heads, HEADS)
    blocks = q_blocks + tl.cdiv(k_heads, HEADS)  # blocks of heads of one position, first Q, then K
    row = tile // blocks
    block = tile % blocks
    batch = (row // positions).to(tl.int64)
    position = (row % positions).to(tl.int64)
    angle = tl.arange(0, HALF)[None, :]
    base = batch * angle_batch_stride + position * angle_stride
    cos = tl.load(COS + base + angle, mask=angle < half, other=0.0).to(tl.float32)  # (1, HALF)
    sin = tl.load(SIN + base + angle, mask=angle < half, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin  # the inverse rotation is the transpose
    if block < q_blocks:
        head = (block * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        source = Q + batch * q_batch_stride + position * q_stride
        out = Q_OUT + row.to(tl.int64) * q_heads * width
        _rotate(
            source, out, cos, sin, head, q_heads, q_head_stride, half, width,
            INTERLEAVED, HALF, PASSTHROUGH,
        )  # fmt: skip
    else:
        head = ((block - q_blocks) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        source = K + batch * k_batch_stride + position * k_stride
        out = K_OUT + row.to(tl.int64) * k_heads * width
        _rotate(
            source, out, cos, sin, head, k_heads, k_head_stride, half, width,
            INTERLEAVED, HALF, PASSTHROUGH,
        )  # fmt: skip
