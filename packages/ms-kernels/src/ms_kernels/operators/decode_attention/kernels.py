"""Attention of one query per sequence over paged keys and values, split over the positions.

Each part has its own softmax maximum and sum, in base 2; a second kernel combines the parts.
"""

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-1.0e30)


@triton.jit(do_not_specialize=["first"])
def decode_parts(
    first,
    Q,
    K,
    V,
    TABLE,
    LENGTHS,
    PART,
    TOP,
    NORM,
    heads,
    group,
    width,
    page,
    pages,
    positions,
    parts,
    part_positions,
    q_stride,
    q_head_stride,
    k_page_stride,
    k_stride,
    k_head_stride,
    v_page_stride,
    v_stride,
    v_head_stride,
    table_stride,
    scale,
    window,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Attend from one group of query heads to `part_positions` positions of one sequence.

    PART is (batch, heads, parts, width) float32, not yet divided by NORM (batch, heads, parts).
    Pages outside 0 to `pages` - 1 and table entries beyond `positions` are not read; they make NORM
    and the result NaN.
    """
    tile = first + tl.program_id(0)
    part = tile % parts
    groups = heads // group
    key_head = (tile // parts % groups).to(tl.int64)
    batch = (tile // parts // groups).to(tl.int64)
    member = tl.arange(0, GROUP)[:, None]
    feature = tl.arange(0, BD)[None, :]
    head = key_head * group + member
    inside = (member < group) & (feature < width)
    q = tl.load(Q + batch * q_stride + head * q_head_stride + feature, mask=inside, other=0.0)
    asked = tl.load(LENGTHS + batch)
    length = tl.minimum(tl.maximum(asked, 0), positions)
    low = part * part_positions
    high = tl.minimum(low + part_positions, length)
    if WINDOW:
        low = tl.maximum(low, (length - window) // BN * BN)
    total = tl.zeros([GROUP, BD], tl.float32)
    norm = tl.zeros([GROUP], tl.float32)
    norm = tl.where(asked == length, norm, float("nan"))
    top = tl.full([GROUP], _LOWEST, tl.float32)
    for start in range(low, high, BN):
        place = start + tl.arange(0, BN)
        seen = place < high
        if WINDOW:
            seen = seen & (place >= length - window)
        at = tl.load(TABLE + batch * table_stride + place // page, mask=seen, other=0)
        fits = (at >= 0) & (at < pages)
        at = at.to(tl.int64)[:, None]
        slot = (place % page).to(tl.int64)[:, None]
        read = (seen & fits)[:, None] & (feature < width)
        k_at = at * k_page_stride + slot * k_stride + key_head * k_head_stride
        k = tl.load(K + k_at + feature, mask=read, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, _LOWEST)
        higher = tl.maximum(top, tl.max(scores, 1))
        shares = tl.where(seen[None, :], tl.exp2(scores - higher[:, None]), 0.0)
        shares = tl.where(fits[None, :], shares, float("nan"))
        shrink = tl.exp2(top - higher)
        norm = norm * shrink + tl.sum(shares, 1)
        v_at = at * v_page_stride + slot * v_stride + key_head * v_head_stride
        v = tl.load(V + v_at + feature, mask=read, other=0.0)
        total = total * shrink[:, None]
        total = tl.dot(shares.to(v.dtype), v, total, input_precision="ieee")
        top = higher
    row = (batch * heads + head) * parts + part
    tl.store(PART + row * width + feature, total, mask=inside)
    own = key_head * group + tl.arange(0, GROUP)
    row = (batch * heads + own) * parts + part
    tl.store(TOP + row, top, mask=tl.arange(0, GROUP) < group)
    tl.store(NORM + row, norm, mask=tl.arange(0, GROUP) < group)


@triton.jit(do_not_specialize=["first"])
def decode_join(
    first,
    PART,
    TOP,
    NORM,
    OUT,
    width,
    parts,
    PARTS: tl.constexpr,
    BD: tl.constexpr,
):
    """Combine the parts of one head: 0 without positions, NaN if a NORM is NaN."""
    row = (first + tl.program_id(0)).to(tl.int64)
    part = tl.arange(0, PARTS)
    feature = tl.arange(0, BD)[None, :]
    tops = tl.load(TOP + row * parts + part, mask=part < parts, other=_LOWEST)
    norms = tl.load(NORM + row * parts + part, mask=part < parts, other=0.0)
    shares = tl.exp2(tops - tl.max(tops, 0))
    norm = tl.sum(norms * shares, 0)
    inside = (part < parts)[:, None] & (feature < width)
    at = PART + (row * parts + part[:, None]) * width + feature
    totals = tl.load(at, mask=inside, other=0.0)
    total = tl.sum(totals * shares[:, None], 0)[None, :]
    result = tl.where(norm == 0, 0.0, total / tl.where(norm == 0, 1.0, norm))
    tl.store(OUT + row * width + feature, result.to(OUT.dtype.element_ty), mask=feature < width)
