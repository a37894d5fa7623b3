"""Forward and backward kernels of gated activations: silu(gate) · up and gelu(gate) · up."""

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    """Return tanh computed from a sigmoid, which every chip supports."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    """Return the activation of `gate` and its derivative, both float32."""
    if ACTIVATION == "silu":
        gate_factor = tl.sigmoid(gate)  # silu(x) = x s, its derivative is s (1 + x (1 - s))
        return gate * gate_factor, gate_factor * (1 + gate * (1 - gate_factor))
    if ACTIVATION == "gelu_tanh":
        # √(2/π) · (x + 0.044715 x³)
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        tanh = _tanh(inner)  # tanh approximation of GELU
        slope = 0.7978845608028654 * (1 + 0.134145 * gate * gate)
        return 0.5 * gate * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * gate * (1 - tanh * tanh) * slope
    # Φ(x), the normal CDF; gelu'(x) = Φ(x) + x φ(x)
    gate_factor = 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
    return gate * gate_factor, gate_factor + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)


@triton.jit
def _tile(first, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return this program's rows (ROWS, 1), columns (1, BLOCK) and the in-bounds mask."""
    tile = first + tl.program_id(0)
    blocks = tl.cdiv(width, BLOCK)
    row = (tile // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tile % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, column, (row < rows) & (column < width)


@triton.jit(do_not_specialize=["first"])
def gated_forward(
    first,
    GATE,
    UP,
    Y,
    rows,
    width,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a tile of Y, which is contiguous."""
    row, column, inside = _tile(first, rows, width, ROWS, BLOCK)
    gate = tl.load(GATE + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(UP + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    value, _ = _activate(gate, ACTIVATION)
    tl.store(Y + row * width + column, (value * up).to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first"])
def gated_backward(
    first,
    DY,
    GATE,
    UP,
    DGATE,
    DUP,
    rows,
    width,
    dy_stride,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a tile of DGATE and DUP, which are contiguous."""
    row, column, inside = _tile(first, rows, width, ROWS, BLOCK)
    gate = tl.load(GATE + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(UP + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(DY + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
    value, slope = _activate(gate, ACTIVATION)
    offset = row * width + column
    tl.store(DGATE + offset, (grad * up * slope).to(DGATE.dtype.element_ty), mask=inside)
    tl.store(DUP + offset, (grad * value).to(DUP.dtype.element_ty), mask=inside)
