"""Attention that never holds the scores, and its gradient (arXiv 2205.14135, 2307.08691).

Numbered differences from the papers:
1. The running maximum starts at a large negative number instead of -inf. A row that has seen
   only masked keys adds up garbage, which the first visible key scales by exactly 0.
2. Documents are skipped by blocks: RANGES gives, for a block of queries, the blocks of keys whose
   documents may touch its own. Within these, pairs are masked one by one.
3. No atomic additions: dq has its own kernel, and dk and dv are summed over the heads of a group
   by the one program that owns them, so that gradients do not change from run to run.
4. A sink, one number a head, is one more score, of a value of zeros: it is taken in after the last
   key, LSE counts it, and so the backward kernels need not know of it.
5. Values may have another width than keys.

Scores are kept in base 2: `scale` is multiplied by log2(e), and LSE is a base-2 logarithm.
"""

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _visible(
    own,
    other,
    keys,
    own_document,
    other_document,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Return which pairs may see each other; `own` and `other` are positions that broadcast."""
    seen = (other < keys) & (own < keys)
    if CAUSAL:
        seen = seen & (own >= other)
    if WINDOW:
        seen = seen & (own - other < window) & (other - own < window)
    if DOCUMENTS:
        seen = seen & (own_document == other_document)
    return seen


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
    """Return the first and the end position of the keys that a block of queries may see."""
    start = block * BM + keys - queries
    low = 0
    high = keys
    if CAUSAL:
        high = tl.minimum(high, start + BM)
    if WINDOW:
        low = tl.maximum(low, start - window + 1)
        high = tl.minimum(high, start + BM - 1 + window)
    if DOCUMENTS:
        place = (batch * tl.cdiv(queries, BM) + block) * 2
        low = tl.maximum(low, tl.load(RANGES + place) * BN)
        high = tl.minimum(high, tl.load(RANGES + place + 1) * BN)
    return low // BN * BN, high


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
    """Return the first and the end index of the queries that may see a block of keys."""
    start = block * BN - (keys - queries)
    low = 0
    high = queries
    if CAUSAL:
        low = tl.maximum(low, start)
    if WINDOW:
        low = tl.maximum(low, start - window + 1)
        high = tl.minimum(high, start + BN - 1 + window)
    if DOCUMENTS:
        place = (batch * tl.cdiv(keys, BN) + block) * 2
        low = tl.maximum(low, tl.load(RANGES + place) * BM)
        high = tl.minimum(high, tl.load(RANGES + place + 1) * BM)
    return low // BM * BM, high


@triton.jit
def _rows(BASE, start, count, stride, width, B: tl.constexpr, BD: tl.constexpr):
    """Load rows `start` to `start + B` of a matrix (count, width), zeros beyond it."""
    row = tl.arange(0, B)[:, None]
    column = tl.arange(0, BD)[None, :]
    inside = (start + row < count) & (column < width)
    at = BASE + tl.cast(start, tl.int64) * stride + row * stride + column
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _put_rows(BASE, value, start, count, stride, width, B: tl.constexpr, BD: tl.constexpr):
    """Store `value` (B, BD) as rows `start` to `start + B` of a matrix (count, width)."""
    row = tl.arange(0, B)[:, None]
    column = tl.arange(0, BD)[None, :]
    inside = (start + row < count) & (column < width)
    at = BASE + tl.cast(start, tl.int64) * stride + row * stride + column
    tl.store(at, value.to(BASE.dtype.element_ty), mask=inside)


@triton.jit
def _attend(
    total,
    norm,
    top,
    q,
    K,
    V,
    low,
    high,
    own,
    keys,
    own_document,
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
    """Take in keys `low` to `high`, a block at a time."""
    for start in range(low, high, BN):
        k = _rows(K, start, keys, k_stride, width, BN, BD)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            other = start + tl.arange(0, BN)
            other_document = own_document
            if DOCUMENTS:
                other_document = tl.load(DOCUMENT + other, mask=other < keys, other=-1)[None, :]
            seen = _visible(
                own, other[None, :], keys, own_document, other_document, window,
                CAUSAL, WINDOW, DOCUMENTS,
            )  # fmt: skip
            scores = tl.where(seen, scores, _LOWEST)
        higher = tl.maximum(top, tl.max(scores, 1))
        shares = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        norm = norm * shrink + tl.sum(shares, 1)
        v = _rows(V, start, keys, v_stride, value_width, BN, BV)
        total = total * shrink[:, None]
        total = tl.dot(shares.to(v.dtype), v, total, input_precision="ieee")
        top = higher
    return total, norm, top


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
    SINK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """Make BM rows of one head of O, contiguous (batch, queries, heads, value_width).

    LSE is (batch, heads, queries). Late queries, which have most to do, come first.
    """
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
    q = _rows(Q, block * BM, queries, q_stride, width, BM, BD)
    own = (block * BM + keys - queries + tl.arange(0, BM))[:, None]
    own_document = own
    if DOCUMENTS:
        own_document = tl.load(DOCUMENT + own, mask=own < keys, other=-2)
    low, high = _key_range(
        block, batch, queries, keys, window, RANGES, CAUSAL, WINDOW, DOCUMENTS, BM, BN
    )
    total = tl.zeros([BM, BV], tl.float32)
    norm = tl.zeros([BM], tl.float32)
    top = tl.full([BM], _LOWEST, tl.float32)
    if not WINDOW and not DOCUMENTS:
        # Blocks that every query sees whole need no mask.
        whole = tl.minimum(high, block * BM + keys - queries + 1) if CAUSAL else high
        whole = whole // BN * BN
        total, norm, top = _attend(
            total, norm, top, q, K, V, low, whole, own, keys, own_document, DOCUMENT,
            k_stride, v_stride, width, value_width, scale, window,
            CAUSAL, WINDOW, DOCUMENTS, False, BN, BD, BV,
        )  # fmt: skip
        low = whole
    total, norm, top = _attend(
        total, norm, top, q, K, V, low, high, own, keys, own_document, DOCUMENT,
        k_stride, v_stride, width, value_width, scale, window,
        CAUSAL, WINDOW, DOCUMENTS, True, BN, BD, BV,
    )  # fmt: skip
    if SINK:
        sink = tl.load(SINKS + head).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(top, sink)
        kept = tl.exp2(top - higher)
        norm = norm * kept + tl.exp2(sink - higher)
        top = higher
        total = total * (kept / norm)[:, None]
    else:
        total = total / norm[:, None]
    _put_rows(O, total, block * BM, queries, heads * value_width, value_width, BM, BV)
    place = block * BM + tl.arange(0, BM)
    LSE += (batch * heads + head) * queries
    tl.store(LSE + place, top + tl.log2(norm), mask=place < queries)


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
    """Write DELTA (batch, heads, queries), the products of the rows of O and DO."""
    tile = first + tl.program_id(0)
    blocks = tl.cdiv(queries, BM)
    block = tile % blocks
    batch = (tile // blocks // heads).to(tl.int64)
    head = (tile // blocks % heads).to(tl.int64)
    O += (batch * queries * heads + head) * value_width
    DO += batch * do_batch_stride + head * do_head_stride
    o = _rows(O, block * BM, queries, heads * value_width, value_width, BM, BV).to(tl.float32)
    do = _rows(DO, block * BM, queries, do_stride, value_width, BM, BV).to(tl.float32)
    place = block * BM + tl.arange(0, BM)
    DELTA += (batch * heads + head) * queries
    tl.store(DELTA + place, tl.sum(o * do, 1), mask=place < queries)


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
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """Make BM rows of one head of DQ, contiguous (batch, queries, heads, width)."""
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
    q = _rows(Q, block * BM, queries, q_stride, width, BM, BD)
    do = _rows(DO, block * BM, queries, do_stride, value_width, BM, BV)
    row = block * BM + tl.arange(0, BM)
    of_head = (batch * heads + head) * queries
    lse = tl.load(LSE + of_head + row, mask=row < queries, other=float("inf"))
    delta = tl.load(DELTA + of_head + row, mask=row < queries, other=0.0)
    own = (row + keys - queries)[:, None]
    own_document = own
    if DOCUMENTS:
        own_document = tl.load(DOCUMENT + own, mask=own < keys, other=-2)
    low, high = _key_range(
        block, batch, queries, keys, window, RANGES, CAUSAL, WINDOW, DOCUMENTS, BM, BN
    )
    dq = tl.zeros([BM, BD], tl.float32)
    for start in range(low, high, BN):
        k = _rows(K, start, keys, k_stride, width, BN, BD)
        v = _rows(V, start, keys, v_stride, value_width, BN, BV)
        other = start + tl.arange(0, BN)
        other_document = own_document
        if DOCUMENTS:
            other_document = tl.load(DOCUMENT + other, mask=other < keys, other=-1)[None, :]
        seen = _visible(
            own, other[None, :], keys, own_document, other_document, window,
            CAUSAL, WINDOW, DOCUMENTS,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        shares = tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)
        slopes = tl.dot(do, tl.trans(v), input_precision="ieee")
        slopes = shares * (slopes - delta[:, None])
        dq = tl.dot(slopes.to(k.dtype), k, dq, input_precision="ieee")
    _put_rows(DQ, dq * scale, block * BM, queries, heads * width, width, BM, BD)


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
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """Make BN rows of one key head of DK and DV, contiguous (batch, keys, heads/group, widths)."""
    tile = first + tl.program_id(0)
    blocks = tl.cdiv(keys, BN)
    block = tile % blocks
    groups = heads // group
    batch = (tile // blocks // groups).to(tl.int64)
    key_head = (tile // blocks % groups).to(tl.int64)
    K += batch * k_batch_stride + key_head * k_head_stride
    V += batch * v_batch_stride + key_head * v_head_stride
    DOCUMENT += batch * document_stride
    k = _rows(K, block * BN, keys, k_stride, width, BN, BD)
    v = _rows(V, block * BN, keys, v_stride, value_width, BN, BV)
    other = (block * BN + tl.arange(0, BN))[:, None]
    other_document = other
    if DOCUMENTS:
        other_document = tl.load(DOCUMENT + other, mask=other < keys, other=-1)
    low, high = _query_range(
        block, batch, queries, keys, window, RANGES, CAUSAL, WINDOW, DOCUMENTS, BM, BN
    )
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BV], tl.float32)
    for member in range(group):
        head = key_head * group + member
        q_base = Q + batch * q_batch_stride + head * q_head_stride
        do_base = DO + batch * do_batch_stride + head * do_head_stride
        of_head = (batch * heads + head) * queries
        for start in range(low, high, BM):
            q = _rows(q_base, start, queries, q_stride, width, BM, BD)
            row = start + tl.arange(0, BM)
            lse = tl.load(LSE + of_head + row, mask=row < queries, other=float("inf"))
            own = (row + keys - queries)[None, :]
            own_document = own
            if DOCUMENTS:
                own_document = tl.load(DOCUMENT + own, mask=own < keys, other=-2)
            seen = _visible(
                own, other, keys, own_document, other_document, window,
                CAUSAL, WINDOW, DOCUMENTS,
            )  # fmt: skip
            # (BN, BM): the transposed scores, so that no product needs a transposed result.
            scores = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * 1.4426950408889634)
            shares = tl.where(seen, tl.exp2(scores - lse[None, :]), 0.0)
            do = _rows(do_base, start, queries, do_stride, value_width, BM, BV)
            dv = tl.dot(shares.to(do.dtype), do, dv, input_precision="ieee")
            delta = tl.load(DELTA + of_head + row, mask=row < queries, other=0.0)
            slopes = tl.dot(v, tl.trans(do), input_precision="ieee")
            slopes = shares * (slopes - delta[None, :])
            dk = tl.dot(slopes.to(q.dtype), q, dk, input_precision="ieee")
    out = batch * keys * groups + key_head
    DK += out * width
    DV += out * value_width
    _put_rows(DK, dk * scale, block * BN, keys, groups * width, width, BN, BD)
    _put_rows(DV, dv, block * BN, keys, groups * value_width, value_width, BN, BV)


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
    """Make the gradient of one head's sink: -Σ share · DELTA, a block of queries at a time."""
    head = (first + tl.program_id(0)).to(tl.int64)
    sink = tl.load(SINKS + head).to(tl.float32) * 1.4426950408889634
    total = tl.zeros([BM], tl.float32)
    for row in range(batch):
        of_head = (tl.cast(row, tl.int64) * heads + head) * queries
        for start in range(0, queries, BM):
            place = start + tl.arange(0, BM)
            lse = tl.load(LSE + of_head + place, mask=place < queries, other=float("inf"))
            delta = tl.load(DELTA + of_head + place, mask=place < queries, other=0.0)
            total -= tl.exp2(sink - lse) * delta
    tl.store(DSINKS + head, tl.sum(total, 0).to(DSINKS.dtype.element_ty))
