"""What a mixture of experts moves and multiplies: gathered rows, weighted sums, groups of rows."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first"])
def gather_rows(first, X, ORDER, OUT, rows, choices, width, stride, BLOCK: tl.constexpr):
    """Copy BLOCK columns of row ORDER[r] // choices of X to row r of OUT, contiguous."""
    tile = first + tl.program_id(0)
    blocks = tl.cdiv(width, BLOCK)
    row = (tile // blocks).to(tl.int64)
    column = (tile % blocks) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(ORDER + row).to(tl.int64) // choices
    x = tl.load(X + source * stride + column, mask=column < width)
    tl.store(OUT + row * width + column, x, mask=column < width)


@triton.jit(do_not_specialize=["first"])
def sum_choices(
    first,
    X,
    PLACES,
    W,
    OUT,
    rows,
    choices,
    width,
    stride,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK columns of OUT[t] = Σ_c W[t, c] · X[PLACES[t, c]].

    A place that is none of the `rows` of X is not read, and makes OUT[t] NaN.
    """
    tile = first + tl.program_id(0)
    blocks = tl.cdiv(width, BLOCK)
    token = (tile // blocks).to(tl.int64)
    column = (tile % blocks) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(choices):
        place = tl.load(PLACES + token * choices + choice).to(tl.int64)
        read = column < tl.where((place >= 0) & (place < rows), width, 0)
        x = tl.load(X + place * stride + column, mask=read, other=float("nan")).to(tl.float32)
        if WEIGHTED:
            x *= tl.load(W + token * choices + choice).to(tl.float32)
        total += x
    tl.store(OUT + token * width + column, total.to(OUT.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["first"])
def spread_choice(
    first,
    DY,
    X,
    PLACES,
    W,
    DX,
    DW,
    rows,
    choices,
    width,
    dy_stride,
    stride,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write row PLACES[t, c] of DX, which each choice owns alone, and DW[t, c] = ⟨DY[t], X⟩.

    A place that is none of the `rows` is neither written nor read, and makes DW[t, c] NaN.
    """
    choice = (first + tl.program_id(0)).to(tl.int64)
    token = choice // choices
    place = tl.load(PLACES + choice).to(tl.int64)
    fits = (place >= 0) & (place < rows)
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(W + choice).to(tl.float32)
    along = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        g = tl.load(DY + token * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        dx = (g * weight).to(DX.dtype.element_ty)
        own = column < tl.where(fits, width, 0)
        tl.store(DX + place * width + column, dx, mask=own)
        if WEIGHTED:
            x = tl.load(X + place * stride + column, mask=own, other=0.0).to(tl.float32)
            along += g * x
    if WEIGHTED:
        slope = tl.where(fits, tl.sum(along, 0), float("nan"))
        tl.store(DW + choice, slope.to(DW.dtype.element_ty))


@triton.jit(do_not_specialize=["first"])
def grouped_rows(
    first,
    X,
    W,
    ENDS,
    OUT,
    rows,
    experts,
    width,
    out_width,
    x_stride,
    w_expert_stride,
    w_stride,
    w_out_stride,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Write up to BM rows, of one expert, and BN columns of OUT = X[rows] @ W[expert].

    ENDS (experts,) says where each expert's rows end. Blocks of rows are counted expert by
    expert, so that none holds rows of two; there are at most rows / BM + experts of them. Rows
    that no expert has, since counts are too few, are NaN; those beyond `rows` are not touched.
    """
    tile = first + tl.program_id(0)
    columns = tl.cdiv(out_width, BN)
    block = tile // columns
    each = tl.arange(0, EXPERTS)
    ends = tl.load(ENDS + each, mask=each < experts, other=0)
    ends = tl.minimum(tl.maximum(ends, 0), rows)
    # triton-ascend takes no address before the first, even where the mask forbids it.
    before = ENDS + tl.maximum(each - 1, 0)
    starts = tl.load(before, mask=(each < experts) & (each > 0), other=0)
    starts = tl.minimum(tl.maximum(starts, 0), rows)
    blocks = (tl.maximum(ends - starts, 0) + BM - 1) // BM
    last = tl.cumsum(blocks, 0)
    # The expert whose blocks come to an end after this one.
    expert = tl.sum(tl.where((last <= block) & (each < experts), 1, 0), 0)
    if expert < experts:
        own = each == expert
        passed = tl.sum(tl.where(own, last - blocks, 0), 0)
        start = tl.sum(tl.where(own, starts, 0), 0) + (block.to(tl.int64) - passed) * BM
        end = tl.sum(tl.where(own, ends, 0), 0)
        row = start + tl.arange(0, BM)[:, None]
        column = (tile % columns) * BN + tl.arange(0, BN)[None, :]
        # Names of their own: triton-ascend takes no pointer whose shape a branch changes.
        matrix = W + expert.to(tl.int64) * w_expert_stride + column.to(tl.int64) * w_out_stride
        values = X + row * x_stride
        total = tl.zeros([BM, BN], tl.float32)
        for offset in range(0, width, BK):
            inner = offset + tl.arange(0, BK)
            inside = (row < end) & (inner < width)[None, :]
            x = tl.load(values + inner[None, :], mask=inside, other=0.0)
            at = matrix + inner.to(tl.int64)[:, None] * w_stride
            w = tl.load(at, mask=(inner < width)[:, None] & (column < out_width), other=0.0)
            total = tl.dot(x, w, total, input_precision="ieee")
        at = OUT + row * out_width + column
        inside = (row < end) & (column < out_width)
        tl.store(at, total.to(OUT.dtype.element_ty), mask=inside)
    else:
        # The blocks to spare suffice: what experts leave is as much less than they take.
        left = tl.max(ends, 0) + (block.to(tl.int64) - tl.max(last, 0)) * BM
        left = left + tl.arange(0, BM)[:, None]
        column = (tile % columns) * BN + tl.arange(0, BN)[None, :]
        nan = tl.full([BM, BN], float("nan"), OUT.dtype.element_ty)
        tl.store(OUT + left * out_width + column, nan, mask=(left < rows) & (column < out_width))


@triton.jit(do_not_specialize=["first"])
def grouped_weights(
    first,
    X,
    DY,
    ENDS,
    DW,
    rows,
    width,
    out_width,
    x_stride,
    dy_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Write a BK x BN tile of DW[expert] = X[its rows]ᵀ @ DY[its rows], contiguous."""
    tile = first + tl.program_id(0)
    columns = tl.cdiv(out_width, BN)
    across = columns * tl.cdiv(width, BK)
    expert = tile // across
    inner = (tile % across // columns) * BK + tl.arange(0, BK)
    column = (tile % columns) * BN + tl.arange(0, BN)
    end = tl.minimum(tl.load(ENDS + expert), rows)
    start = tl.load(ENDS + tl.maximum(expert - 1, 0), mask=expert > 0, other=0)
    start = tl.maximum(start, 0)
    total = tl.zeros([BK, BN], tl.float32)
    for offset in range(start, end, BM):
        row = (offset + tl.arange(0, BM)).to(tl.int64)[:, None]
        x_at = X + row * x_stride + inner[None, :]
        x = tl.load(x_at, mask=(row < end) & (inner < width)[None, :], other=0.0)
        dy_at = DY + row * dy_stride + column[None, :]
        dy = tl.load(dy_at, mask=(row < end) & (column < out_width)[None, :], other=0.0)
        total = tl.dot(tl.trans(x), dy, total, input_precision="ieee")
    at = (expert.to(tl.int64) * width + inner[:, None]) * out_width + column[None, :]
    inside = (inner < width)[:, None] & (column < out_width)[None, :]
    tl.store(DW + at, total.to(DW.dtype.element_ty), mask=inside)
