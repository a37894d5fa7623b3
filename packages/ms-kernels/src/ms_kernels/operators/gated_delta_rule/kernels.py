"""Gated delta rule step by step: a program holds a block of columns of one head's state.

Columns of the state are independent: each belongs to one feature of the values. The gradients of q,
k, g and β are sums over columns, so they are written as one partial sum per column block.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(first, heads, out_width, BV: tl.constexpr):
    """Return a program's column block, columns (1, BV), head and batch."""
    tile = first + tl.program_id(0)
    blocks = tl.cdiv(out_width, BV)
    block = (tile % blocks).to(tl.int64)
    column = (tile % blocks) * BV + tl.arange(0, BV)[None, :]
    head = (tile // blocks % heads).to(tl.int64)
    return block, column, head, (tile // blocks // heads).to(tl.int64)


@triton.jit
def _vector(AT, feature, width, NORMALIZE: tl.constexpr):
    """Load a key or query (BD, 1), normalized to unit length if NORMALIZE."""
    x = tl.load(AT + feature, mask=feature < width, other=0.0).to(tl.float32)
    if NORMALIZE:
        x = x / tl.sqrt_rn(tl.sum(x * x, 0)[None, :] + 1e-6)
    return x


@triton.jit
def _begins(DOCUMENTS, row, place):
    """Return whether a document starts at position `place` of a row of document ids, (1, 1)."""
    own = tl.load(DOCUMENTS + row + place)
    return own != tl.load(DOCUMENTS + row + tl.where(place > 0, place - 1, place))


@triton.jit(do_not_specialize=["first"])
def delta_forward(
    first,
    Q,
    K,
    V,
    G,
    BETA,
    DOCUMENTS,
    STATE,
    OUT,
    FINAL,
    SAVED,
    positions,
    heads,
    group,
    width,
    out_width,
    q_batch_stride,
    q_stride,
    q_head_stride,
    k_batch_stride,
    k_stride,
    k_head_stride,
    v_batch_stride,
    v_stride,
    v_head_stride,
    scale,
    rows_each,
    NORMALIZE: tl.constexpr,
    CUT: tl.constexpr,
    GIVEN: tl.constexpr,
    SAVE: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """Write OUT (batch, positions, heads, out_width) and FINAL (batch, heads, width, out_width).

    With SAVE, write instead the state before every `rows_each`-th position to SAVED (batch, heads,
    parts, width, out_width).
    """
    _, column, head, batch = _tile(first, heads, out_width, BV)
    feature = tl.arange(0, BD)[:, None]
    inside = (feature < width) & (column < out_width)
    cell = feature * out_width + column
    own = (batch * heads + head) * width * out_width
    state = tl.zeros([BD, BV], tl.float32)
    if GIVEN:
        state = tl.load(STATE + own + cell, mask=inside, other=0.0).to(tl.float32)
    parts = tl.cdiv(positions, rows_each)
    key_head = head // group
    for step in range(positions):
        place = step + tl.zeros([1, 1], tl.int64)
        if SAVE:  # noqa: SIM102 - known when compiled, and the other is not
            if step % rows_each == 0:
                at = (batch * heads + head) * parts + step // rows_each
                tl.store(SAVED + at * width * out_width + cell, state, mask=inside)
        at = K + batch * k_batch_stride + place * k_stride + key_head * k_head_stride
        k = _vector(at, feature, width, NORMALIZE)
        at = V + batch * v_batch_stride + place * v_stride + head * v_head_stride
        v = tl.load(at + column, mask=column < out_width, other=0.0).to(tl.float32)
        row = (batch * positions + place) * heads + head
        if CUT:
            state = tl.where(_begins(DOCUMENTS, batch * positions, place), 0.0, state)
        state *= tl.exp(tl.load(G + row).to(tl.float32))
        share = tl.load(BETA + row).to(tl.float32)
        state += k * ((v - tl.sum(state * k, 0)[None, :]) * share)
        if not SAVE:
            at = Q + batch * q_batch_stride + place * q_stride + key_head * q_head_stride
            q = _vector(at, feature, width, NORMALIZE) * scale
            out = tl.sum(state * q, 0)[None, :].to(OUT.dtype.element_ty)
            tl.store(OUT + row * out_width + column, out, mask=column < out_width)
    if not SAVE:
        tl.store(FINAL + own + cell, state, mask=inside)


@triton.jit(do_not_specialize=["first"])
def delta_backward(
    first,
    Q,
    K,
    V,
    G,
    BETA,
    DOCUMENTS,
    SAVED,
    ROOM,
    DOUT,
    DFINAL,
    DQ,
    DK,
    DV,
    DG,
    DBETA,
    DSTATE,
    positions,
    heads,
    group,
    width,
    out_width,
    q_batch_stride,
    q_stride,
    q_head_stride,
    k_batch_stride,
    k_stride,
    k_head_stride,
    v_batch_stride,
    v_stride,
    v_head_stride,
    batch_count,
    scale,
    rows_each,
    NORMALIZE: tl.constexpr,
    CUT: tl.constexpr,
    PULLED: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """Process parts in reverse: recompute a part's decayed states into ROOM, then go backward.

    DQ and DK (blocks, batch, positions, heads, width), DG and DBETA (blocks, batch, positions,
    heads) are partial sums over this block of columns, with respect to the normalized q and k if
    NORMALIZE. ROOM (programs, rows_each, BD, BV) is scratch memory with one slot per program.
    """
    block, column, head, batch = _tile(first, heads, out_width, BV)
    feature = tl.arange(0, BD)[:, None]
    inside = (feature < width) & (column < out_width)
    cell = feature * out_width + column
    own = (batch * heads + head) * width * out_width
    room = ROOM + (first + tl.program_id(0)).to(tl.int64) * rows_each * BD * BV
    spot = feature * BV + tl.arange(0, BV)[None, :]
    pull = tl.zeros([BD, BV], tl.float32)
    if PULLED:
        pull = tl.load(DFINAL + own + cell, mask=inside, other=0.0).to(tl.float32)
    parts = tl.cdiv(positions, rows_each)
    key_head = head // group
    for back in range(parts):
        part = (parts - 1 - back).to(tl.int64)
        start = part * rows_each
        count = tl.minimum(rows_each, positions - start).to(tl.int32)
        kept = ((batch * heads + head) * parts + part) * width * out_width
        state = tl.load(SAVED + kept + cell, mask=inside, other=0.0)
        for step in range(count):
            place = start + step + tl.zeros([1, 1], tl.int64)
            at = K + batch * k_batch_stride + place * k_stride + key_head * k_head_stride
            k = _vector(at, feature, width, NORMALIZE)
            at = V + batch * v_batch_stride + place * v_stride + head * v_head_stride
            v = tl.load(at + column, mask=column < out_width, other=0.0).to(tl.float32)
            row = (batch * positions + place) * heads + head
            if CUT:
                state = tl.where(_begins(DOCUMENTS, batch * positions, place), 0.0, state)
            state *= tl.exp(tl.load(G + row).to(tl.float32))
            at = step + tl.zeros([1, 1], tl.int64)
            tl.store(room + at * BD * BV + spot, state)
            share = tl.load(BETA + row).to(tl.float32)
            state += k * ((v - tl.sum(state * k, 0)[None, :]) * share)
        tl.debug_barrier()  # threads read states that other threads wrote
        for step in range(count):
            at = tl.zeros([1, 1], tl.int64) + count - 1 - step
            place = start + at
            faded = tl.load(room + at * BD * BV + spot)
            at = K + batch * k_batch_stride + place * k_stride + key_head * k_head_stride
            k = _vector(at, feature, width, NORMALIZE)
            at = Q + batch * q_batch_stride + place * q_stride + key_head * q_head_stride
            q = _vector(at, feature, width, NORMALIZE) * scale
            at = V + batch * v_batch_stride + place * v_stride + head * v_head_stride
            v = tl.load(at + column, mask=column < out_width, other=0.0).to(tl.float32)
            row = (batch * positions + place) * heads + head
            share = tl.load(BETA + row).to(tl.float32)
            at = DOUT + row * out_width + column
            grad = tl.load(at, mask=column < out_width, other=0.0).to(tl.float32)
            missing = v - tl.sum(faded * k, 0)[None, :]
            change = missing * share
            dq = tl.sum((faded + k * change) * grad, 1)[:, None] * scale
            pull += q * grad
            of_change = tl.sum(pull * k, 0)[None, :]
            dk = tl.sum(pull * change, 1)[:, None]
            of_missing = of_change * share
            pull -= k * of_missing
            dk -= tl.sum(faded * of_missing, 1)[:, None]
            fade = tl.sum(tl.sum(pull * faded, 1)[:, None], 0)[None, :]
            mine = block * batch_count * positions * heads + row
            tl.store(DQ + mine * width + feature, dq, mask=feature < width)
            tl.store(DK + mine * width + feature, dk, mask=feature < width)
            of_v = of_missing.to(DV.dtype.element_ty)
            tl.store(DV + row * out_width + column, of_v, mask=column < out_width)
            tl.store(DG + mine, fade)
            tl.store(DBETA + mine, tl.sum(of_change * missing, 1)[:, None])
            pull *= tl.exp(tl.load(G + row).to(tl.float32))
            if CUT:
                pull = tl.where(_begins(DOCUMENTS, batch * positions, place), 0.0, pull)
        tl.debug_barrier()
    tl.store(DSTATE + own + cell, pull, mask=inside)
