"""Kernels for products of consecutive rows with their expert's matrix, and the weight gradient."""

import triton
import triton.language as tl


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
    """Write up to BM rows of one expert and BN columns of OUT = X[rows] @ W[expert].

    ENDS (experts,) is the end of each expert's rows. Blocks of rows are assigned per expert, so no
    block spans two experts; there are at most rows / BM + experts blocks. If the counts are too
    small, rows without an expert are NaN; memory beyond `rows` is not written.
    """
    tile = first + tl.program_id(0)
    columns = tl.cdiv(out_width, BN)
    block = tile // columns
    each = tl.arange(0, EXPERTS)
    ends = tl.load(ENDS + each, mask=each < experts, other=0)
    ends = tl.minimum(tl.maximum(ends, 0), rows)
    # triton-ascend does not allow an address before ENDS, even if it is masked.
    before = ENDS + tl.maximum(each - 1, 0)
    starts = tl.load(before, mask=(each < experts) & (each > 0), other=0)
    starts = tl.minimum(tl.maximum(starts, 0), rows)
    blocks = (tl.maximum(ends - starts, 0) + BM - 1) // BM
    last = tl.cumsum(blocks, 0)
    # The first expert whose last block is this one or a later one.
    expert = tl.sum(tl.where((last <= block) & (each < experts), 1, 0), 0)
    if expert < experts:
        own = each == expert
        passed = tl.sum(tl.where(own, last - blocks, 0), 0)
        start = tl.sum(tl.where(own, starts, 0), 0) + (block.to(tl.int64) - passed) * BM
        end = tl.sum(tl.where(own, ends, 0), 0)
        row = start + tl.arange(0, BM)[:, None]
        column = (tile % columns) * BN + tl.arange(0, BN)[None, :]
        # Separate names: triton-ascend does not allow a branch to change the shape of a pointer.
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
        # Unused blocks cover the rows without an expert: those rows reduce the blocks in use.
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
    """Write a BK x BN tile of DW[expert] = X[rows]ᵀ @ DY[rows]; DW is contiguous."""
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
