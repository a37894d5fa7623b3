"""FlashAttention forward and backward kernels (arXiv 2205.14135, 2307.08691).

Differences from the papers:
1. The running maximum starts at a large negative number instead of -inf. A row that has met only
   masked keys accumulates garbage, which the first visible key rescales by exactly 0.
2. Blocks of queries and keys are empty, full or partial. Empty ones are skipped, full ones run
   without a mask, and in partial ones every pair is masked. Causality and the window decide
   by arithmetic; for documents, RANGES has four numbers per block: the range of blocks that share
   a document with it, and the range of blocks in the same single document.
3. No atomics: dq has its own kernel, and one program sums dk and dv over the query heads of a
   group, so gradients are deterministic.
4. A sink, one number per head, is an extra score whose value is zero. It is added after the last
   key and included in LSE, so the backward kernels for q, k and v need no change.
5. Values may have a different width than keys.

Scores are in base 2: `scale` includes log2(e), and LSE is a base-2 logarithm. Queries are the last
`queries` of the `keys` positions.

Shapes: BM queries, BN keys, BD head features and BV value features per tile.
"""

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _visible(
    q_pos,
    k_pos,
    keys,
    q_doc,
    k_doc,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Return the mask of visible pairs for broadcastable query and key positions."""
    visible = (k_pos < keys) & (q_pos < keys)
    if CAUSAL:
        visible = visible & (q_pos >= k_pos)
    if WINDOW:
        visible = visible & (q_pos - k_pos < window) & (k_pos - q_pos < window)
    if DOCUMENTS:
        visible = visible & (q_doc == k_doc)
    return visible


@triton.jit
def _key_range(
    block,
    batch,
    queries,
    keys,
    window,
    RANGES,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Return the range of keys that a block of queries can see, and the part that needs no mask.

    The first range is [k_start, k_end). Inside it, whole blocks of keys [full_start, full_end) are
    visible to every query of the block. All but k_end are multiples of BN.
    """
    first = block * BM + keys - queries  # position of the block's first query
    last = first + BM - 1
    k_start = 0
    k_end = keys
    full_start = 0
    full_end = keys // BN
    if CAUSAL:
        k_end = tl.minimum(k_end, last + 1)  # no key after the last query
        full_end = tl.minimum(full_end, (first + 1) // BN)
    if WINDOW:
        # no key before the window of the first query
        k_start = tl.maximum(k_start, first - window + 1)
        k_end = tl.minimum(k_end, last + window)
        full_start = tl.maximum(full_start, tl.cdiv(tl.maximum(last - window + 1, 0), BN))
        full_end = tl.minimum(full_end, (first + window) // BN)
    if DOCUMENTS:
        index = (batch * tl.cdiv(queries, BM) + block) * 4
        k_start = tl.maximum(k_start, tl.load(RANGES + index) * BN)
        k_end = tl.minimum(k_end, tl.load(RANGES + index + 1) * BN)
        full_start = tl.maximum(full_start, tl.load(RANGES + index + 2))
        full_end = tl.minimum(full_end, tl.load(RANGES + index + 3))
    k_start = k_start // BN * BN
    full_end = tl.maximum(full_end * BN, k_start)
    full_start = tl.minimum(tl.maximum(full_start * BN, k_start), full_end)
    return k_start, k_end, full_start, full_end


@triton.jit
def _query_range(
    block,
    batch,
    queries,
    keys,
    window,
    RANGES,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Return the range of queries that can see a block of keys, and the part that needs no mask.

    The first range is [q_start, q_end). Inside it, whole blocks of queries [full_start, full_end)
    see every key of the block. All but q_end are multiples of BM.
    """
    first = block * BN - (keys - queries)  # index of the query at the block's first key
    last = first + BN - 1
    q_start = 0
    q_end = queries
    full_start = 0
    full_end = tl.cdiv(queries, BM)  # queries beyond the last have weights of zero
    if CAUSAL:
        q_start = tl.maximum(q_start, first)
        full_start = tl.maximum(full_start, tl.cdiv(tl.maximum(last, 0), BM))
    if WINDOW:
        q_start = tl.maximum(q_start, first - window + 1)
        q_end = tl.minimum(q_end, last + window)
        full_start = tl.maximum(full_start, tl.cdiv(tl.maximum(last - window + 1, 0), BM))
        full_end = tl.minimum(full_end, tl.maximum(first + window, 0) // BM)
    if DOCUMENTS:
        index = (batch * tl.cdiv(keys, BN) + block) * 4
        q_start = tl.maximum(q_start, tl.load(RANGES + index) * BM)
        q_end = tl.minimum(q_end, tl.load(RANGES + index + 1) * BM)
        full_start = tl.maximum(full_start, tl.load(RANGES + index + 2))
        full_end = tl.minimum(full_end, tl.load(RANGES + index + 3))
    q_start = q_start // BM * BM
    full_end = tl.maximum(full_end * BM, q_start)
    full_start = tl.minimum(tl.maximum(full_start * BM, q_start), full_end)
    return q_start, q_end, full_start, full_end


@triton.jit
def _extremes(DOCUMENT, start, keys, B: tl.constexpr):
    """Return the smallest and the largest document of positions [start, start + B)."""
    position = start + tl.arange(0, B)
    document = tl.load(DOCUMENT + tl.minimum(position, keys - 1))
    return tl.min(document, 0), tl.max(document, 0)


@triton.jit(do_not_specialize=["first"])
def attention_ranges(
    first,
    DOCUMENT,
    RANGES,
    keys,
    document_stride,
    start,
    blocks,
    other_start,
    other_blocks,
    B: tl.constexpr,
    OTHER: tl.constexpr,
):
    """Write the four numbers of one block's RANGES (batch, blocks, 4).

    The blocks hold B positions from `start` on, and are compared with blocks of OTHER positions
    from `other_start` on: queries with keys, or keys with queries.
    """
    tile = first + tl.program_id(0)
    block = tile % blocks
    batch = (tile // blocks).to(tl.int64)
    DOCUMENT += batch * document_stride
    # smallest and largest document of this block
    low, high = _extremes(DOCUMENT, start + block * B, keys, B)
    shared_start = other_blocks
    shared_end = 0
    same_start = other_blocks
    same_end = 0
    same_count = 0
    for block_b in range(other_blocks):
        other_low, other_high = _extremes(DOCUMENT, other_start + block_b * OTHER, keys, OTHER)
        shared = (low <= other_high) & (high >= other_low)  # the ranges of documents overlap
        # both blocks hold one document, the same one
        same = (low == high) & (other_low == other_high) & (low == other_low)
        shared_start = tl.minimum(shared_start, tl.where(shared, block_b, other_blocks))
        shared_end = tl.maximum(shared_end, tl.where(shared, block_b + 1, 0))
        same_start = tl.minimum(same_start, tl.where(same, block_b, other_blocks))
        same_end = tl.maximum(same_end, tl.where(same, block_b + 1, 0))
        same_count += tl.where(same, 1, 0)
    gapless = same_count == same_end - same_start  # a document may come back later in its row
    RANGES += (batch * blocks + block) * 4
    tl.store(RANGES, tl.minimum(shared_start, shared_end))
    tl.store(RANGES + 1, shared_end)
    tl.store(RANGES + 2, tl.where(gapless, same_start, 0))
    tl.store(RANGES + 3, tl.where(gapless, same_end, 0))


@triton.jit
def _load_rows(BASE, start, count, stride, width, B: tl.constexpr, BD: tl.constexpr):
    """Load rows [start, start + B) of a (count, width) matrix, zero-padded to (B, BD)."""
    row = tl.arange(0, B)[:, None]
    column = tl.arange(0, BD)[None, :]
    inside = (start + row < count) & (column < width)
    pointer = BASE + tl.cast(start, tl.int64) * stride + row * stride + column
    return tl.load(pointer, mask=inside, other=0.0)


@triton.jit
def _store_rows(BASE, value, start, count, stride, width, B: tl.constexpr, BD: tl.constexpr):
    """Store `value` (B, BD) to rows [start, start + B) of a (count, width) matrix."""
    row = tl.arange(0, B)[:, None]
    column = tl.arange(0, BD)[None, :]
    inside = (start + row < count) & (column < width)
    pointer = BASE + tl.cast(start, tl.int64) * stride + row * stride + column
    tl.store(pointer, value.to(BASE.dtype.element_ty), mask=inside)


@triton.jit
def _attend_blocks(
    acc,
    l_i,
    m_i,
    q,
    K,
    V,
    k_start,
    k_end,
    q_pos,
    keys,
    q_doc,
    DOCUMENT,
    k_stride,
    v_stride,
    width,
    value_width,
    scale,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    MASKED: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """Online softmax over the key blocks in [k_start, k_end).

    acc (BM, BV) is the unnormalized output, m_i (BM,) the running row maximum, l_i (BM,) the
    running sum of exp2(score - m_i). MASKED is False if every query sees all of these keys.
    """
    for start in range(k_start, k_end, BN):
        k = _load_rows(K, start, keys, k_stride, width, BN, BD)  # (BN, BD)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (BM, BN)
        if MASKED:
            k_pos = start + tl.arange(0, BN)
            k_doc = q_doc
            if DOCUMENTS:
                k_doc = tl.load(DOCUMENT + k_pos, mask=k_pos < keys, other=-1)[None, :]
            visible = _visible(
                q_pos, k_pos[None, :], keys, q_doc, k_doc, window,
                CAUSAL, WINDOW, DOCUMENTS,
            )  # fmt: skip
            s = tl.where(visible, s, _LOWEST)
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)  # rescales the sums under the old maximum
        l_i = l_i * alpha + tl.sum(p, 1)
        v = _load_rows(V, start, keys, v_stride, value_width, BN, BV)  # (BN, BV)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        m_i = m_new
    return acc, l_i, m_i


@triton.jit(do_not_specialize=["first"])
def attention_forward(
    first,
    Q,
    K,
    V,
    DOCUMENT,
    RANGES,
    SINKS,
    O,
    LSE,
    queries,
    keys,
    heads,
    group,
    width,
    value_width,
    q_batch_stride,
    q_stride,
    q_head_stride,
    k_batch_stride,
    k_stride,
    k_head_stride,
    v_batch_stride,
    v_stride,
    v_head_stride,
    document_stride,
    scale,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    SAME: tl.constexpr,
    SINK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """Compute BM rows of one head of O (batch, queries, heads, value_width) and of LSE.

    O is contiguous, LSE is (batch, heads, queries). Under a causal mask the last query blocks have
    the most work, so they are launched first.
    """
    if SAME:  # lets the compiler reuse the column mask of q and k for v
        value_width = width
    tile = first + tl.program_id(0)
    blocks = tl.cdiv(queries, BM)
    block = blocks - 1 - tile % blocks
    batch = (tile // blocks // heads).to(tl.int64)
    head = (tile // blocks % heads).to(tl.int64)
    Q += batch * q_batch_stride + head * q_head_stride
    K += batch * k_batch_stride + head // group * k_head_stride
    V += batch * v_batch_stride + head // group * v_head_stride
    DOCUMENT += batch * document_stride
    O += (batch * queries * heads + head) * value_width
    q = _load_rows(Q, block * BM, queries, q_stride, width, BM, BD)  # (BM, BD)
    q_pos = (block * BM + keys - queries + tl.arange(0, BM))[:, None]  # (BM, 1)
    q_doc = q_pos
    if DOCUMENTS:
        q_doc = tl.load(DOCUMENT + q_pos, mask=q_pos < keys, other=-2)
    k_start, k_end, full_start, full_end = _key_range(
        block, batch, queries, keys, window, RANGES, CAUSAL, WINDOW, DOCUMENTS, BM, BN
    )
    acc = tl.zeros([BM, BV], tl.float32)  # unnormalized output
    l_i = tl.zeros([BM], tl.float32)  # running sum of exp2(s - m_i)
    m_i = tl.full([BM], _LOWEST, tl.float32)  # running row maximum
    if WINDOW or DOCUMENTS:
        acc, l_i, m_i = _attend_blocks(
            acc, l_i, m_i, q, K, V, k_start, full_start, q_pos, keys, q_doc, DOCUMENT,
            k_stride, v_stride, width, value_width, scale, window,
            CAUSAL, WINDOW, DOCUMENTS, True, BN, BD, BV,
        )  # fmt: skip
    acc, l_i, m_i = _attend_blocks(
        acc, l_i, m_i, q, K, V, full_start, full_end, q_pos, keys, q_doc, DOCUMENT,
        k_stride, v_stride, width, value_width, scale, window,
        CAUSAL, WINDOW, DOCUMENTS, False, BN, BD, BV,
    )  # fmt: skip
    acc, l_i, m_i = _attend_blocks(
        acc, l_i, m_i, q, K, V, full_end, k_end, q_pos, keys, q_doc, DOCUMENT,
        k_stride, v_stride, width, value_width, scale, window,
        CAUSAL, WINDOW, DOCUMENTS, True, BN, BD, BV,
    )  # fmt: skip
    # The sink joins the softmax as one more score, whose value is zero.
    if SINK:
        sink = tl.load(SINKS + head).to(tl.float32) * 1.4426950408889634
        m_new = tl.maximum(m_i, sink)
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.exp2(sink - m_new)
        m_i = m_new
        acc = acc * (alpha / l_i)[:, None]
    else:
        acc = acc / l_i[:, None]
    _store_rows(O, acc, block * BM, queries, heads * value_width, value_width, BM, BV)
    row = block * BM + tl.arange(0, BM)
    LSE += (batch * heads + head) * queries
    tl.store(LSE + row, m_i + tl.log2(l_i), mask=row < queries)


@triton.jit(do_not_specialize=["first"])
def attention_delta(
    first,
    O,
    DO,
    DELTA,
    queries,
    heads,
    value_width,
    do_batch_stride,
    do_stride,
    do_head_stride,
    BM: tl.constexpr,
    BV: tl.constexpr,
):
    """Compute DELTA (batch, heads, queries), the row-wise dot products of O and DO."""
    tile = first + tl.program_id(0)
    blocks = tl.cdiv(queries, BM)
    block = tile % blocks
    batch = (tile // blocks // heads).to(tl.int64)
    head = (tile // blocks % heads).to(tl.int64)
    O += (batch * queries * heads + head) * value_width
    DO += batch * do_batch_stride + head * do_head_stride
    o = _load_rows(O, block * BM, queries, heads * value_width, value_width, BM, BV).to(tl.float32)
    do = _load_rows(DO, block * BM, queries, do_stride, value_width, BM, BV).to(tl.float32)
    row = block * BM + tl.arange(0, BM)
    DELTA += (batch * heads + head) * queries
    tl.store(DELTA + row, tl.sum(o * do, 1), mask=row < queries)


@triton.jit
def _add_query_gradients(
    dq,
    q,
    do,
    lse,
    delta,
    K,
    V,
    k_start,
    k_end,
    q_pos,
    keys,
    q_doc,
    DOCUMENT,
    k_stride,
    v_stride,
    width,
    value_width,
    scale,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    MASKED: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """Accumulate dq (BM, BD) over the key blocks in [k_start, k_end).

    MASKED is False if every query sees all of these keys.
    """
    for start in range(k_start, k_end, BN):
        k = _load_rows(K, start, keys, k_stride, width, BN, BD)  # (BN, BD)
        v = _load_rows(V, start, keys, v_stride, value_width, BN, BV)  # (BN, BV)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        p = tl.exp2(s - lse[:, None])  # (BM, BN)
        if MASKED:
            k_pos = start + tl.arange(0, BN)
            k_doc = q_doc
            if DOCUMENTS:
                k_doc = tl.load(DOCUMENT + k_pos, mask=k_pos < keys, other=-1)[None, :]
            visible = _visible(
                q_pos, k_pos[None, :], keys, q_doc, k_doc, window,
                CAUSAL, WINDOW, DOCUMENTS,
            )  # fmt: skip
            p = tl.where(visible, p, 0.0)
        # gradient of p before the softmax, (BM, BN)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])  # (BM, BN)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["first"])
def attention_backward_queries(
    first,
    Q,
    K,
    V,
    DOCUMENT,
    RANGES,
    DO,
    LSE,
    DELTA,
    DQ,
    queries,
    keys,
    heads,
    group,
    width,
    value_width,
    q_batch_stride,
    q_stride,
    q_head_stride,
    k_batch_stride,
    k_stride,
    k_head_stride,
    v_batch_stride,
    v_stride,
    v_head_stride,
    do_batch_stride,
    do_stride,
    do_head_stride,
    document_stride,
    scale,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    SAME: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """Compute BM rows of one head of DQ (batch, queries, heads, width), contiguous."""
    if SAME:  # lets the compiler reuse the column mask of q and k for v
        value_width = width
    tile = first + tl.program_id(0)
    blocks = tl.cdiv(queries, BM)
    block = blocks - 1 - tile % blocks
    batch = (tile // blocks // heads).to(tl.int64)
    head = (tile // blocks % heads).to(tl.int64)
    Q += batch * q_batch_stride + head * q_head_stride
    K += batch * k_batch_stride + head // group * k_head_stride
    V += batch * v_batch_stride + head // group * v_head_stride
    DO += batch * do_batch_stride + head * do_head_stride
    DOCUMENT += batch * document_stride
    DQ += (batch * queries * heads + head) * width
    q = _load_rows(Q, block * BM, queries, q_stride, width, BM, BD)  # (BM, BD)
    do = _load_rows(DO, block * BM, queries, do_stride, value_width, BM, BV)
    row = block * BM + tl.arange(0, BM)
    head_offset = (batch * heads + head) * queries
    # +inf for rows past the end, so that p is 0
    lse = tl.load(LSE + head_offset + row, mask=row < queries, other=float("inf"))
    delta = tl.load(DELTA + head_offset + row, mask=row < queries, other=0.0)
    q_pos = (row + keys - queries)[:, None]
    q_doc = q_pos
    if DOCUMENTS:
        q_doc = tl.load(DOCUMENT + q_pos, mask=q_pos < keys, other=-2)
    k_start, k_end, full_start, full_end = _key_range(
        block, batch, queries, keys, window, RANGES, CAUSAL, WINDOW, DOCUMENTS, BM, BN
    )
    dq = tl.zeros([BM, BD], tl.float32)  # (BM, BD)
    if WINDOW or DOCUMENTS:
        dq = _add_query_gradients(
            dq, q, do, lse, delta, K, V, k_start, full_start, q_pos, keys, q_doc, DOCUMENT,
            k_stride, v_stride, width, value_width, scale, window,
            CAUSAL, WINDOW, DOCUMENTS, True, BN, BD, BV,
        )  # fmt: skip
    dq = _add_query_gradients(
        dq, q, do, lse, delta, K, V, full_start, full_end, q_pos, keys, q_doc, DOCUMENT,
        k_stride, v_stride, width, value_width, scale, window,
        CAUSAL, WINDOW, DOCUMENTS, False, BN, BD, BV,
    )  # fmt: skip
    dq = _add_query_gradients(
        dq, q, do, lse, delta, K, V, full_end, k_end, q_pos, keys, q_doc, DOCUMENT,
        k_stride, v_stride, width, value_width, scale, window,
        CAUSAL, WINDOW, DOCUMENTS, True, BN, BD, BV,
    )  # fmt: skip
    _store_rows(DQ, dq * scale, block * BM, queries, heads * width, width, BM, BD)


@triton.jit
def _add_key_gradients(
    dk,
    dv,
    k,
    v,
    Q,
    DO,
    LSE,
    DELTA,
    q_start,
    q_end,
    k_pos,
    queries,
    keys,
    k_doc,
    DOCUMENT,  # of the first query
    q_stride,
    do_stride,
    width,
    value_width,
    scale,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    MASKED: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """Accumulate dk (BN, BD) and dv (BN, BV) over one head's queries in [q_start, q_end).

    MASKED is False if all of these queries see every key of the block.
    """
    for start in range(q_start, q_end, BM):
        q = _load_rows(Q, start, queries, q_stride, width, BM, BD)  # (BM, BD)
        row = start + tl.arange(0, BM)
        lse = tl.load(LSE + row, mask=row < queries, other=float("inf"))
        # Scores are transposed, (BN, BM), so that no product needs a transposed left operand.
        s = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * 1.4426950408889634)
        p = tl.exp2(s - lse[None, :])
        if MASKED:
            q_pos = (row + keys - queries)[None, :]
            q_doc = q_pos
            if DOCUMENTS:
                q_doc = tl.load(DOCUMENT + row, mask=row < queries, other=-2)[None, :]
            visible = _visible(
                q_pos, k_pos, keys, q_doc, k_doc, window,
                CAUSAL, WINDOW, DOCUMENTS,
            )  # fmt: skip
            p = tl.where(visible, p, 0.0)
        do = _load_rows(DO, start, queries, do_stride, value_width, BM, BV)  # (BM, BV)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        delta = tl.load(DELTA + row, mask=row < queries, other=0.0)
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")  # (BN, BM)
        ds = p * (dp - delta[None, :])  # (BN, BM)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["first"])
def attention_backward_keys(
    first,
    Q,
    K,
    V,
    DOCUMENT,
    RANGES,
    DO,
    LSE,
    DELTA,
    DK,
    DV,
    queries,
    keys,
    heads,
    group,
    width,
    value_width,
    q_batch_stride,
    q_stride,
    q_head_stride,
    k_batch_stride,
    k_stride,
    k_head_stride,
    v_batch_stride,
    v_stride,
    v_head_stride,
    do_batch_stride,
    do_stride,
    do_head_stride,
    document_stride,
    scale,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    SAME: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """Compute BN rows of one key head of DK and DV (batch, keys, heads / group, width), contiguous.

    The program sums over the `group` query heads that share the key head.
    """
    if SAME:  # lets the compiler reuse the column mask of q and k for v
        value_width = width
    tile = first + tl.program_id(0)
    blocks = tl.cdiv(keys, BN)
    block = tile % blocks
    groups = heads // group
    batch = (tile // blocks // groups).to(tl.int64)
    key_head = (tile // blocks % groups).to(tl.int64)
    K += batch * k_batch_stride + key_head * k_head_stride
    V += batch * v_batch_stride + key_head * v_head_stride
    DOCUMENT += batch * document_stride
    k = _load_rows(K, block * BN, keys, k_stride, width, BN, BD)  # (BN, BD)
    v = _load_rows(V, block * BN, keys, v_stride, value_width, BN, BV)  # (BN, BV)
    k_pos = (block * BN + tl.arange(0, BN))[:, None]
    k_doc = k_pos
    if DOCUMENTS:
        k_doc = tl.load(DOCUMENT + k_pos, mask=k_pos < keys, other=-1)
    q_start, q_end, full_start, full_end = _query_range(
        block, batch, queries, keys, window, RANGES, CAUSAL, WINDOW, DOCUMENTS, BM, BN
    )
    Q_DOCUMENT = DOCUMENT + (keys - queries)  # queries are the last positions
    dk = tl.zeros([BN, BD], tl.float32)  # (BN, BD)
    dv = tl.zeros([BN, BV], tl.float32)  # (BN, BV)
    # Grouped queries: sum over the query heads that share this key head.
    for i in range(group):
        head = key_head * group + i
        q_base = Q + batch * q_batch_stride + head * q_head_stride
        do_base = DO + batch * do_batch_stride + head * do_head_stride
        rows = (batch * heads + head) * queries
        dk, dv = _add_key_gradients(
            dk, dv, k, v, q_base, do_base, LSE + rows, DELTA + rows, q_start, full_start,
            k_pos, queries, keys, k_doc, Q_DOCUMENT, q_stride, do_stride, width, value_width,
            scale, window, CAUSAL, WINDOW, DOCUMENTS, True, BM, BD, BV,
        )  # fmt: skip
        dk, dv = _add_key_gradients(
            dk, dv, k, v, q_base, do_base, LSE + rows, DELTA + rows, full_start, full_end,
            k_pos, queries, keys, k_doc, Q_DOCUMENT, q_stride, do_stride, width, value_width,
            scale, window, CAUSAL, WINDOW, DOCUMENTS, False, BM, BD, BV,
        )  # fmt: skip
        if WINDOW or DOCUMENTS:
            dk, dv = _add_key_gradients(
                dk, dv, k, v, q_base, do_base, LSE + rows, DELTA + rows, full_end, q_end,
                k_pos, queries, keys, k_doc, Q_DOCUMENT, q_stride, do_stride, width, value_width,
                scale, window, CAUSAL, WINDOW, DOCUMENTS, True, BM, BD, BV,
            )  # fmt: skip
    out_row = batch * keys * groups + key_head
    DK += out_row * width
    DV += out_row * value_width
    _store_rows(DK, dk * scale, block * BN, keys, groups * width, width, BN, BD)
    _store_rows(DV, dv, block * BN, keys, groups * value_width, value_width, BN, BV)


@triton.jit(do_not_specialize=["first"])
def attention_backward_sinks(
    first,
    SINKS,
    LSE,
    DELTA,
    DSINKS,
    batch,
    queries,
    heads,
    BM: tl.constexpr,
):
    """Compute the gradient of one head's sink: -Σ p_sink · DELTA over all queries."""
    head = (first + tl.program_id(0)).to(tl.int64)
    sink = tl.load(SINKS + head).to(tl.float32) * 1.4426950408889634
    acc = tl.zeros([BM], tl.float32)
    for b in range(batch):
        head_offset = (tl.cast(b, tl.int64) * heads + head) * queries
        for start in range(0, queries, BM):
            row = start + tl.arange(0, BM)
            # +inf for rows past the end, so that p is 0
            lse = tl.load(LSE + head_offset + row, mask=row < queries, other=float("inf"))
            delta = tl.load(DELTA + head_offset + row, mask=row < queries, other=0.0)
            acc -= tl.exp2(sink - lse) * delta  # p_sink = exp2(sink - lse)
    tl.store(DSINKS + head, tl.sum(acc, 0).to(DSINKS.dtype.element_ty))
