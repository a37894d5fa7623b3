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
    MAXIMUM,
    EXP_SUM,
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

    PART is (batch, heads, parts, width) float32, not yet divided by EXP_SUM (batch, heads,
    parts). Pages outside 0 to `pages` - 1 and table entries beyond `positions` are not read; they
    make EXP_SUM and the result NaN.
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
    # (GROUP, BD)
    q = tl.load(Q + batch * q_stride + head * q_head_stride + feature, mask=inside, other=0.0)
    requested_length = tl.load(LENGTHS + batch)
    length = tl.minimum(tl.maximum(requested_length, 0), positions)
    low = part * part_positions
    high = tl.minimum(low + part_positions, length)
    if WINDOW:
        low = tl.maximum(low, (length - window) // BN * BN)
    acc = tl.zeros([GROUP, BD], tl.float32)  # unnormalized output
    l_i = tl.zeros([GROUP], tl.float32)  # running sum of exp2(s - m_i)
    # An invalid length makes the sequence NaN instead of reading out of bounds.
    l_i = tl.where(requested_length == length, l_i, float("nan"))
    m_i = tl.full([GROUP], _LOWEST, tl.float32)  # running maximum
    for start in range(low, high, BN):
        pos = start + tl.arange(0, BN)
        visible = pos < high
        if WINDOW:
            visible = visible & (pos >= length - window)
        page_id = tl.load(TABLE + batch * table_stride + pos // page, mask=visible, other=0)
        fits = (page_id >= 0) & (page_id < pages)
        page_id = page_id.to(tl.int64)[:, None]
        slot = (pos % page).to(tl.int64)[:, None]
        read = (visible & fits)[:, None] & (feature < width)
        k_at = page_id * k_page_stride + slot * k_stride + key_head * k_head_stride
        k = tl.load(K + k_at + feature, mask=read, other=0.0)  # (BN, BD)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (GROUP, BN)
        s = tl.where(visible[None, :], s, _LOWEST)
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.where(visible[None, :], tl.exp2(s - m_new[:, None]), 0.0)
        p = tl.where(fits[None, :], p, float("nan"))
        alpha = tl.exp2(m_i - m_new)  # rescales the sums under the old maximum
        l_i = l_i * alpha + tl.sum(p, 1)
        v_at = page_id * v_page_stride + slot * v_stride + key_head * v_head_stride
        v = tl.load(V + v_at + feature, mask=read, other=0.0)  # (BN, BD)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        m_i = m_new
    row = (batch * heads + head) * parts + part
    tl.store(PART + row * width + feature, acc, mask=inside)
    head_row = key_head * group + tl.arange(0, GROUP)
    row = (batch * heads + head_row) * parts + part
    tl.store(MAXIMUM + row, m_i, mask=tl.arange(0, GROUP) < group)
    tl.store(EXP_SUM + row, l_i, mask=tl.arange(0, GROUP) < group)


@triton.jit(do_not_specialize=["first"])
def combine_parts(
    first,
    PART,
    MAXIMUM,
    EXP_SUM,
    OUT,
    width,
    parts,
    PARTS: tl.constexpr,
    BD: tl.constexpr,
):
    """Combine the parts of one head: 0 without positions, NaN if an EXP_SUM is NaN."""
    row = (first + tl.program_id(0)).to(tl.int64)
    part = tl.arange(0, PARTS)
    feature = tl.arange(0, BD)[None, :]
    maxima = tl.load(MAXIMUM + row * parts + part, mask=part < parts, other=_LOWEST)  # (PARTS,)
    exp_sums = tl.load(EXP_SUM + row * parts + part, mask=part < parts, other=0.0)
    alpha = tl.exp2(maxima - tl.max(maxima, 0))
    l_i = tl.sum(exp_sums * alpha, 0)
    inside = (part < parts)[:, None] & (feature < width)
    part_at = PART + (row * parts + part[:, None]) * width + feature
    totals = tl.load(part_at, mask=inside, other=0.0)  # (PARTS, BD)
    acc = tl.sum(totals * alpha[:, None], 0)[None, :]
    result = tl.where(l_i == 0, 0.0, acc / tl.where(l_i == 0, 1.0, l_i))
    tl.store(OUT + row * width + feature, result.to(OUT.dtype.element_ty), mask=feature < width)
