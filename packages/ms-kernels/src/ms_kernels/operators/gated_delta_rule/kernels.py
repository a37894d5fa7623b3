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
def _begins(DOCUMENTS, row, pos):
    """Return whether a document starts at position `pos` of a row of document ids, (1, 1)."""
    doc = tl.load(DOCUMENTS + row + pos)
    return doc != tl.load(DOCUMENTS + row + tl.where(pos > 0, pos - 1, pos))


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
    rows_per_part,
    NORMALIZE: tl.constexpr,
    CUT: tl.constexpr,
    HAS_STATE: tl.constexpr,
    SAVE: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """Write OUT (batch, positions, heads, out_width) and FINAL (batch, heads, width, out_width).

    With SAVE, write instead the state before every `rows_per_part`-th position to SAVED (batch,
    heads, parts, width, out_width).
    """
    _, column, head, batch = _tile(first, heads, out_width, BV)
    feature = tl.arange(0, BD)[:, None]
    inside = (feature < width) & (column < out_width)
    cell = feature * out_width + column
    state_at = (batch * heads + head) * width * out_width
    state = tl.zeros([BD, BV], tl.float32)  # S, (BD, BV)
    if HAS_STATE:
        state = tl.load(STATE + state_at + cell, mask=inside, other=0.0).to(tl.float32)
    parts = tl.cdiv(positions, rows_per_part)
    key_head = head // group
    for step in range(positions):
        pos = step + tl.zeros([1, 1], tl.int64)
        if SAVE:  # noqa: SIM102 - known when compiled, and the other is not
            if step % rows_per_part == 0:
                at = (batch * heads + head) * parts + step // rows_per_part
                tl.store(SAVED + at * width * out_width + cell, state, mask=inside)
        at = K + batch * k_batch_stride + pos * k_stride + key_head * k_head_stride
        k = _vector(at, feature, width, NORMALIZE)
        at = V + batch * v_batch_stride + pos * v_stride + head * v_head_stride
        v = tl.load(at + column, mask=column < out_width, other=0.0).to(tl.float32)
        row = (batch * positions + pos) * heads + head
        if CUT:
            state = tl.where(_begins(DOCUMENTS, batch * positions, pos), 0.0, state)
        state *= tl.exp(tl.load(G + row).to(tl.float32))  # S ← e^g · S
        beta = tl.load(BETA + row).to(tl.float32)
        state += k * ((v - tl.sum(state * k, 0)[None, :]) * beta)  # S ← S + k (β · (v - Sᵀk))ᵀ
        if not SAVE:
            at = Q + batch * q_batch_stride + pos * q_stride + key_head * q_head_stride
            q = _vector(at, feature, width, NORMALIZE) * scale  # (BD, 1)
            out = tl.sum(state * q, 0)[None, :].to(OUT.dtype.element_ty)  # scale · Sᵀq, (1, BV)
            tl.store(OUT + row * out_width + column, out, mask=column < out_width)
    if not SAVE:
        tl.store(FINAL + state_at + cell, state, mask=inside)


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
    SCRATCH,
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
    rows_per_part,
    NORMALIZE: tl.constexpr,
    CUT: tl.constexpr,
    HAS_DFINAL: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """Process parts in reverse: recompute a part's decayed states, then go backward.

    DQ and DK (blocks, batch, positions, heads, width), DG and DBETA (blocks, batch, positions,
    heads) are partial sums over this block of columns, with respect to the normalized q and k if
    NORMALIZE. SCRATCH (programs, rows_per_part, BD, BV) holds the states, per program.
    """
    block, column, head, batch = _tile(first, heads, out_width, BV)
    feature = tl.arange(0, BD)[:, None]
    inside = (feature < width) & (column < out_width)
    cell = feature * out_width + column
    state_at = (batch * heads + head) * width * out_width
    scratch = SCRATCH + (first + tl.program_id(0)).to(tl.int64) * rows_per_part * BD * BV
    slot = feature * BV + tl.arange(0, BV)[None, :]
    dstate = tl.zeros([BD, BV], tl.float32)  # S, (BD, BV)
    if HAS_DFINAL:
        dstate = tl.load(DFINAL + state_at + cell, mask=inside, other=0.0).to(tl.float32)
    parts = tl.cdiv(positions, rows_per_part)
    key_head = head // group
    # Parts bound the scratch memory: only one part of the states exists at a time.
    for back in range(parts):
        part = (parts - 1 - back).to(tl.int64)
        start = part * rows_per_part
        count = tl.minimum(rows_per_part, positions - start).to(tl.int32)
        saved_at = ((batch * heads + head) * parts + part) * width * out_width
        state = tl.load(SAVED + saved_at + cell, mask=inside, other=0.0)
        for step in range(count):
            pos = start + step + tl.zeros([1, 1], tl.int64)
            at = K + batch * k_batch_stride + pos * k_stride + key_head * k_head_stride
            k = _vector(at, feature, width, NORMALIZE)
            at = V + batch * v_batch_stride + pos * v_stride + head * v_head_stride
            v = tl.load(at + column, mask=column < out_width, other=0.0).to(tl.float32)
            row = (batch * positions + pos) * heads + head
            if CUT:
                state = tl.where(_begins(DOCUMENTS, batch * positions, pos), 0.0, state)
            state *= tl.exp(tl.load(G + row).to(tl.float32))
            at = step + tl.zeros([1, 1], tl.int64)
            tl.store(scratch + at * BD * BV + slot, state)
            beta = tl.load(BETA + row).to(tl.float32)
            state += k * ((v - tl.sum(state * k, 0)[None, :]) * beta)
        tl.debug_barrier()  # threads read states that other threads wrote
        for step in range(count):
            at = tl.zeros([1, 1], tl.int64) + count - 1 - step
            pos = start + at
            decayed = tl.load(scratch + at * BD * BV + slot)  # e^g · S, before the update
            at = K + batch * k_batch_stride + pos * k_stride + key_head * k_head_stride
            k = _vector(at, feature, width, NORMALIZE)
            at = Q + batch * q_batch_stride + pos * q_stride + key_head * q_head_stride
            q = _vector(at, feature, width, NORMALIZE) * scale  # (BD, 1)
            at = V + batch * v_batch_stride + pos * v_stride + head * v_head_stride
            v = tl.load(at + column, mask=column < out_width, other=0.0).to(tl.float32)
            row = (batch * positions + pos) * heads + head
            beta = tl.load(BETA + row).to(tl.float32)
            at = DOUT + row * out_width + column
            dout = tl.load(at, mask=column < out_width, other=0.0).to(tl.float32)
            error = v - tl.sum(decayed * k, 0)[None, :]  # v - Sᵀk, (1, BV)
            update = error * beta  # (1, BV)
            dq = tl.sum((decayed + k * update) * dout, 1)[:, None] * scale  # (BD, 1)
            dstate += q * dout  # S after the update produced the output
            dupdate = tl.sum(dstate * k, 0)[None, :]  # (1, BV)
            dk = tl.sum(dstate * update, 1)[:, None]
            derror = dupdate * beta  # error = v - Sᵀk, so it is also dv
            dstate -= k * derror  # through the product Sᵀk
            dk -= tl.sum(decayed * derror, 1)[:, None]
            # d e^g / dg = e^g, hence ⟨dS, e^g · S⟩
            dg = tl.sum(tl.sum(dstate * decayed, 1)[:, None], 0)[None, :]
            grad_row = block * batch_count * positions * heads + row
            tl.store(DQ + grad_row * width + feature, dq, mask=feature < width)
            tl.store(DK + grad_row * width + feature, dk, mask=feature < width)
            dv = derror.to(DV.dtype.element_ty)
            tl.store(DV + row * out_width + column, dv, mask=column < out_width)
            tl.store(DG + grad_row, dg)
            tl.store(DBETA + grad_row, tl.sum(dupdate * error, 1)[:, None])
            dstate *= tl.exp(tl.load(G + row).to(tl.float32))
            if CUT:
                dstate = tl.where(_begins(DOCUMENTS, batch * positions, pos), 0.0, dstate)
        tl.debug_barrier()
    tl.store(DSTATE + state_at + cell, dstate, mask=inside)
