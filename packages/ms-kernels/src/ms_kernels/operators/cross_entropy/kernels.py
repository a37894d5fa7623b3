"""Cross-entropy over rows of logits: one pass for the loss, a second for the gradient."""

import triton
import triton.language as tl


@triton.jit
def _gradient(x, total, slope, hit, smoothing, z_loss, classes):
    """Return slope · d/dx of (total - (1-s)·x[target] - s·mean(x) + z·total²)."""
    share = tl.exp(x - total) * (1 + 2 * z_loss * total)
    return slope * (share - smoothing / classes - tl.where(hit, 1.0 - smoothing, 0.0))


@triton.jit(do_not_specialize=["first", "ignore_index"])
def cross_entropy_forward(
    first,
    LOGITS,
    TARGETS,
    LOSSES,
    TOTALS,
    GRADIENT,
    classes,
    stride,
    gradient_stride,
    ignore_index,
    smoothing,
    z_loss,
    factor,
    DIFFERENTIATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one row's loss and log Σ exp; with DIFFERENTIATE also its gradient times `factor`.

    An out-of-range target gives a NaN loss without an out-of-bounds read. GRADIENT may alias
    LOGITS.
    """
    row = (first + tl.program_id(0)).to(tl.int64)
    target = tl.load(TARGETS + row)
    LOGITS += row * stride
    GRADIENT += row * gradient_stride
    if target == ignore_index:
        tl.store(LOSSES + row, 0.0)
        tl.store(TOTALS + row, 0.0)
        if DIFFERENTIATE:
            for start in range(0, classes, BLOCK):
                column = start + tl.arange(0, BLOCK)
                zero = tl.zeros([BLOCK], GRADIENT.dtype.element_ty)
                tl.store(GRADIENT + column, zero, mask=column < classes)
    else:
        # Read before the reductions, which synchronize all threads: GRADIENT may overwrite it.
        fits = (target >= 0) & (target < classes)
        picked = tl.load(LOGITS + target, mask=fits, other=float("nan")).to(tl.float32)
        top = -float("inf")
        norm = 0.0
        mean = 0.0
        for start in range(0, classes, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(LOGITS + column, mask=column < classes, other=-float("inf"))
            x = x.to(tl.float32)
            higher = tl.maximum(top, tl.max(x, 0))
            # Subtract nothing until a finite logit was seen: -inf - -inf is NaN.
            shift = tl.where(higher == -float("inf"), 0.0, higher)
            norm = norm * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), 0)
            top = higher
            mean += tl.sum(tl.where(column < classes, x, 0.0), 0)
        total = tl.where(top == -float("inf"), top, top + tl.log(norm))
        loss = total - (1 - smoothing) * picked + z_loss * total * total
        # 0 · -inf is NaN: without smoothing, a class masked by -inf must not affect the loss.
        loss = tl.where(smoothing > 0, loss - smoothing * (mean / classes), loss)
        tl.store(LOSSES + row, loss)
        tl.store(TOTALS + row, total)
        if DIFFERENTIATE:
            for start in range(0, classes, BLOCK):
                column = start + tl.arange(0, BLOCK)
                x = tl.load(LOGITS + column, mask=column < classes, other=0.0).to(tl.float32)
                hit = column == target
                g = _gradient(x, total, factor, hit, smoothing, z_loss, classes)
                g = g.to(GRADIENT.dtype.element_ty)
                tl.store(GRADIENT + column, g, mask=column < classes)


@triton.jit(do_not_specialize=["first", "ignore_index"])
def cross_entropy_backward(
    first,
    LOGITS,
    TARGETS,
    TOTALS,
    SLOPES,
    GRADIENT,
    classes,
    stride,
    gradient_stride,
    ignore_index,
    smoothing,
    z_loss,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK columns of one row of GRADIENT, which may alias LOGITS."""
    tile = first + tl.program_id(0)
    blocks = tl.cdiv(classes, BLOCK)
    row = (tile // blocks).to(tl.int64)
    column = (tile % blocks) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(TARGETS + row)
    slope = tl.load(SLOPES + row).to(tl.float32)
    total = tl.load(TOTALS + row)
    # An ignored row is not read, so its gradient is 0 even if it contains NaN or infinity.
    read = column < tl.where(target == ignore_index, 0, classes)
    x = tl.load(LOGITS + row * stride + column, mask=read, other=0.0).to(tl.float32)
    g = _gradient(x, total, slope, column == target, smoothing, z_loss, classes)
    g = tl.where(read, g, 0.0).to(GRADIENT.dtype.element_ty)
    tl.store(GRADIENT + row * gradient_stride + column, g, mask=column < classes)
