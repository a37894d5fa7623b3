"""Cross-entropy over rows of logits: one pass for the loss, a second for the gradient."""

import triton
import triton.language as tl


@triton.jit
def _gradient(x, lse, dloss, hit, smoothing, z_loss, classes):
    """Return dloss · d/dx of (lse - (1-s)·x[target] - s·mean(x) + z·lse²)."""
    p = tl.exp(x - lse) * (1 + 2 * z_loss * lse)  # softmax, plus d(z · lse²)
    return dloss * (p - smoothing / classes - tl.where(hit, 1.0 - smoothing, 0.0))


@triton.jit(do_not_specialize=["first", "ignore_index"])
def cross_entropy_forward(
    first,
    LOGITS,
    TARGETS,
    LOSSES,
    LSE,
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
        tl.store(LSE + row, 0.0)
        if DIFFERENTIATE:
            for start in range(0, classes, BLOCK):
                column = start + tl.arange(0, BLOCK)
                zero = tl.zeros([BLOCK], GRADIENT.dtype.element_ty)
                tl.store(GRADIENT + column, zero, mask=column < classes)
    else:
        # Read before the reductions, which synchronize all threads: GRADIENT may overwrite it.
        fits = (target >= 0) & (target < classes)  # an out-of-range target must not be read
        target_logit = tl.load(LOGITS + target, mask=fits, other=float("nan")).to(tl.float32)
        m_i = -float("inf")  # running maximum
        l_i = 0.0  # running sum of exp(x - m_i)
        mean = 0.0  # Σ x, for label smoothing
        for start in range(0, classes, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(LOGITS + column, mask=column < classes, other=-float("inf"))
            x = x.to(tl.float32)
            m_new = tl.maximum(m_i, tl.max(x, 0))
            # Subtract nothing until a finite logit was seen: -inf - -inf is NaN.
            shift = tl.where(m_new == -float("inf"), 0.0, m_new)
            l_i = l_i * tl.exp(m_i - shift) + tl.sum(tl.exp(x - shift), 0)
            m_i = m_new
            mean += tl.sum(tl.where(column < classes, x, 0.0), 0)
        lse = tl.where(m_i == -float("inf"), m_i, m_i + tl.log(l_i))  # log Σ exp(x)
        loss = lse - (1 - smoothing) * target_logit + z_loss * lse * lse
        # 0 · -inf is NaN: without smoothing, a class masked by -inf must not affect the loss.
        loss = tl.where(smoothing > 0, loss - smoothing * (mean / classes), loss)
        tl.store(LOSSES + row, loss)
        tl.store(LSE + row, lse)
        if DIFFERENTIATE:
            for start in range(0, classes, BLOCK):
                column = start + tl.arange(0, BLOCK)
                x = tl.load(LOGITS + column, mask=column < classes, other=0.0).to(tl.float32)
                hit = column == target
                g = _gradient(x, lse, factor, hit, smoothing, z_loss, classes)
                g = g.to(GRADIENT.dtype.element_ty)  # rounded once, from float32
                tl.store(GRADIENT + column, g, mask=column < classes)


@triton.jit(do_not_specialize=["first", "ignore_index"])
def cross_entropy_backward(
    first,
    LOGITS,
    TARGETS,
    LSE,
    ROW_GRADS,
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
    dloss = tl.load(ROW_GRADS + row).to(tl.float32)
    lse = tl.load(LSE + row)
    # An ignored row is not read, so its gradient is 0 even if it contains NaN or infinity.
    read = column < tl.where(target == ignore_index, 0, classes)
    x = tl.load(LOGITS + row * stride + column, mask=read, other=0.0).to(tl.float32)
    g = _gradient(x, lse, dloss, column == target, smoothing, z_loss, classes)
    g = tl.where(read, g, 0.0).to(GRADIENT.dtype.element_ty)
    tl.store(GRADIENT + row * gradient_stride + column, g, mask=column < classes)
