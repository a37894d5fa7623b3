"""Products with a matrix packed in 4 or 8 bits, which is unpacked in registers.

In the forward pass, codes minus 2^(bits-1) are small integers, exact in half precision; scales and
zeros are applied to the float32 sum of each group. In the backward pass the sum runs across groups,
so a weight is represented as the sum of two half-precision numbers and takes two products: rounding
it to one half-precision number would exceed the gradient's tolerance.
"""

import triton
import triton.language as tl


@triton.jit
def _codes(PACKED, row, inner, inside, BITS: tl.constexpr):
    """Return float32 codes minus 2^(BITS-1); `inner` is the index of a weight in its row."""
    if BITS == 8:
        return tl.load(PACKED + row + inner, mask=inside, other=128).to(tl.float32) - 128.0
    # two codes per byte, the even one in the low half
    byte = tl.load(PACKED + row + inner // 2, mask=inside, other=0).to(tl.int32)
    return ((byte >> (inner % 2 * 4)) & 15).to(tl.float32) - 8.0


@triton.jit(do_not_specialize=["first"])
def quantized_forward(
    first,
    X,
    PACKED,
    SCALES,
    ZEROS,
    OUT,
    rows,
    width,
    out_width,
    groups,
    group_size,
    x_stride,
    BITS: tl.constexpr,
    ZEROED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Write a BM x BN tile of OUT = X @ weightᵀ; all tensors except X are contiguous."""
    tile = first + tl.program_id(0)
    columns = tl.cdiv(out_width, BN)
    row = (tile // columns).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    column = (tile % columns) * BN + tl.arange(0, BN)
    X += row * x_stride
    packed_row = column.to(tl.int64)[None, :] * (width * BITS // 8)
    scale_at = column.to(tl.int64) * groups
    acc = tl.zeros([BM, BN], tl.float32)  # (BM, BN)
    for group in range(groups):
        group_acc = tl.zeros([BM, BN], tl.float32)  # (BM, BN)
        # Σ x over the group, for the zeros: (q - z)·x = q·x - z·Σx
        x_sum = tl.zeros([BM], tl.float32)
        for offset in range(0, group_size, BK):
            step = offset + tl.arange(0, BK)
            inner = group * group_size + step
            in_group = step < group_size
            # (BM, BK)
            x = tl.load(X + inner[None, :], mask=(row < rows) & in_group[None, :], other=0.0)
            inside = in_group[:, None] & (column < out_width)[None, :]
            codes = _codes(PACKED, packed_row, inner[:, None], inside, BITS)  # (BK, BN)
            group_acc = tl.dot(x, codes.to(x.dtype), group_acc, input_precision="ieee")
            if ZEROED:
                x_sum += tl.sum(x.to(tl.float32), 1)
        scale = tl.load(SCALES + scale_at + group, mask=column < out_width, other=0.0)
        if ZEROED:
            zero = tl.load(ZEROS + scale_at + group, mask=column < out_width, other=0.0)
            middle: tl.constexpr = 128.0 if BITS == 8 else 8.0
            group_acc -= x_sum[:, None] * (zero.to(tl.float32) - middle)[None, :]
        acc += group_acc * scale.to(tl.float32)[None, :]  # scale once per group, not per weight
    at = OUT + row * out_width + column[None, :]
    inside = (row < rows) & (column < out_width)[None, :]
    tl.store(at, acc.to(OUT.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first"])
def quantized_backward(
    first,
    DY,
    PACKED,
    SCALES,
    ZEROS,
    DX,
    rows,
    width,
    out_width,
    groups,
    group_size,
    dy_stride,
    BITS: tl.constexpr,
    ZEROED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Write a BM x BK tile of DX = DY @ weight; all tensors except DY are contiguous."""
    tile = first + tl.program_id(0)
    columns = tl.cdiv(width, BK)
    row = (tile // columns).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    inner = (tile % columns) * BK + tl.arange(0, BK)[None, :]
    group = inner // group_size
    DY += row * dy_stride
    middle: tl.constexpr = 128.0 if BITS == 8 else 8.0
    acc = tl.zeros([BM, BK], tl.float32)
    for offset in range(0, out_width, BN):
        column = offset + tl.arange(0, BN)
        g = tl.load(  # (BM, BN)
            DY + column[None, :], mask=(row < rows) & (column < out_width)[None, :], other=0.0
        )
        inside = (column < out_width)[:, None] & (inner < width)
        packed_row = column.to(tl.int64)[:, None] * (width * BITS // 8)
        weight = _codes(PACKED, packed_row, inner, inside, BITS)  # (BN, BK)
        scale_at = column.to(tl.int64)[:, None] * groups + group
        if ZEROED:
            zero = tl.load(ZEROS + scale_at, mask=inside, other=0.0).to(tl.float32)
            weight -= zero - middle
        weight *= tl.load(SCALES + scale_at, mask=inside, other=0.0).to(tl.float32)
        # weight = high + low, each exact in the dtype of g to twice its precision together.
        high = weight.to(g.dtype)
        acc = tl.dot(g, high, acc, input_precision="ieee")
        if g.dtype != tl.float32:
            low = (weight - high.to(tl.float32)).to(g.dtype)
            acc = tl.dot(g, low, acc, input_precision="ieee")
    at = DX + row * width + inner
    inside = (row < rows) & (inner < width)
    tl.store(at, acc.to(DX.dtype.element_ty), mask=inside)
