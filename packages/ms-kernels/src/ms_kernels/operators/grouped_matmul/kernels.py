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

    ENDS (experts,) is the end of index expert's rows. Blocks of rows are assigned per expert, so no
    block spans two experts; there are at most rows / BM + experts blocks. If the counts are too
    small, rows without an expert are NaN; memory beyond `rows` is not written.
    """
    tile = first + tl.program_id(0)
    columns = tl.cdiv(out_width, BN)
    block = tile // columns
    index = tl.arange(0, EXPERTS)
    ends = tl.load(ENDS + index, mask=index < experts, other=0)
    # Clamp: counts are not validated on the device, and must not cause out-of-bounds access.
    ends = tl.minimum(tl.maximum(ends, 0), rows)
    # triton-ascend does not allow an address before ENDS, even if it is masked.
    before = ENDS + tl.maximum(index - 1, 0)
    starts = tl.load(before, mask=(index < experts) & (index > 0), other=0)
    starts = tl.minimum(tl.maximum(starts, 0), rows)
    blocks = (tl.maximum(ends - starts, 0) + BM - 1) // BM  # row blocks per expert
    last = tl.cumsum(blocks, 0)  # end of each expert in units of blocks
    # The first expert whose last block is this one or a later one.
    expert = tl.sum(tl.where((last <= block) & (index < experts), 1, 0), 0)
    if expert < experts:
        selected = index == expert
        # blocks of the experts before this one
        first_block = tl.sum(tl.where(selected, last - blocks, 0), 0)
        start = tl.sum(tl.where(selected, starts, 0), 0) + (block.to(tl.int64) - first_block) * BM
        end = tl.sum(tl.where(selected, ends, 0), 0)
        row = start + tl.arange(0, BM)[:, None]
        column = (tile % columns) * BN + tl.arange(0, BN)[None, :]
        # Separate names: triton-ascend does not allow a branch to change the shape of a pointer.
        matrix = W + expert.to(tl.int64) * w_expert_stride + column.to(tl.int64) * w_out_stride
        values = X + row * x_stride
        acc = tl.zeros([BM, BN], tl.float32)  # (BM, BN)
        for offset in range(0, width, BK):
            inner = offset + tl.arange(0, BK)
            inside = (row < end) & (inner < width)[None, :]
            x = tl.load(values + inner[None, :], mask=inside, other=0.0)  # (BM, BK)
            at = matrix + inner.to(tl.int64)[:, None] * w_stride
            # (BK, BN)
            w = tl.load(at, mask=(inner < width)[:, None] & (column < out_width), other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        at = OUT + row * out_width + column
        inside = (row < end) & (column < out_width)
        tl.store(at, acc.to(OUT.dtype.element_ty), mask=inside)
    else:
        # Unused blocks cover the rows without an expert: those rows reduce the blocks in use.
        tail_row = tl.max(ends, 0) + (block.to(tl.int64) - tl.max(last, 0)) * BM
        tail_row = tail_row + tl.arange(0, BM)[:, None]
        column = (tile % columns) * BN + tl.arange(0, BN)[None, :]
        nan = tl.full([BM, BN], float("nan"), OUT.dtype.element_ty)
        tl.store(
            OUT + tail_row * out_width + column, nan, mask=(tail_row < rows) & (column < out_width)
        )


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
    acc = tl.zeros([BK, BN], tl.float32)  # (BK, BN)
    for offset in range(start, end, BM):
        row = (offset + tl.arange(0, BM)).to(tl.int64)[:, None]
        x_at = X + row * x_stride + inner[None, :]
        x = tl.load(x_at, mask=(row < end) & (inner < width)[None, :], other=0.0)  # (BM, BK)
        dy_at = DY + row * dy_stride + column[None, :]
        dy = tl.load(dy_at, mask=(row < end) & (column < out_width)[None, :], other=0.0)  # (BM, BN)
        acc = tl.dot(tl.trans(x), dy, acc, input_precision="ieee")
    at = (expert.to(tl.int64) * width + inner[:, None]) * out_width + column[None, :]
    inside = (inner < width)[:, None] & (column < out_width)[None, :]
    tl.store(DW + at, acc.to(DW.dtype.element_ty), mask=inside)
