"""Forward and backward kernels: log-probabilities of tokens and entropies of rows of logits."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first", "ignore_index"])
def chosen_forward(
    first,
    LOGITS,
    TOKENS,
    CHOSEN,
    ENTROPY,
    TOTALS,
    classes,
    stride,
    ignore_index,
    beta,
    BLOCK: tl.constexpr,
):
    """Write one row's log p[token], -Σ p log p and log Σ exp of LOGITS · beta.

    `beta` is 1 / temperature. An out-of-range token gives a NaN log-probability without an
    out-of-bounds read.
    """
    row = (first + tl.program_id(0)).to(tl.int64)
    token = tl.load(TOKENS + row)
    LOGITS += row * stride
    top = -float("inf")
    norm = 0.0
    mean = 0.0
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < classes
        x = tl.load(LOGITS + column, mask=inside, other=-float("inf")).to(tl.float32) * beta
        higher = tl.maximum(top, tl.max(x, 0))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        share = tl.exp(x - shift)
        shrink = tl.exp(top - shift)
        norm = norm * shrink + tl.sum(share, 0)
        # 0 · -inf is NaN, but a class masked by -inf must add 0.
        mean = mean * shrink + tl.sum(tl.where(share > 0, share * x, 0.0), 0)
        top = higher
    total = top + tl.log(norm)
    counted = token != ignore_index
    fits = (token >= 0) & (token < classes)
    picked = tl.load(LOGITS + token, mask=fits, other=float("nan")).to(tl.float32) * beta
    tl.store(CHOSEN + row, tl.where(counted, picked - total, 0.0))
    tl.store(ENTROPY + row, tl.where(counted, total - mean / norm, 0.0))
    tl.store(TOTALS + row, total)


@triton.jit(do_not_specialize=["first", "ignore_index"])
def chosen_backward(
    first,
    LOGITS,
    TOKENS,
    TOTALS,
    ENTROPY,
    PULL,
    SPREAD_PULL,
    GRADIENT,
    classes,
    stride,
    gradient_stride,
    ignore_index,
    beta,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK columns of one row of GRADIENT.

    d log p[t] = e_t - p and dH = -p · (log p + H), scaled by the row's PULL, SPREAD_PULL and beta.
    """
    tile = first + tl.program_id(0)
    blocks = tl.cdiv(classes, BLOCK)
    row = (tile // blocks).to(tl.int64)
    column = (tile % blocks) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(TOKENS + row)
    pull = tl.load(PULL + row) * beta
    spread = tl.load(SPREAD_PULL + row) * beta
    # An ignored row is not read: it may contain NaN.
    read = column < tl.where(token == ignore_index, 0, classes)
    x = tl.load(LOGITS + row * stride + column, mask=read, other=0.0).to(tl.float32) * beta
    log_share = x - tl.load(TOTALS + row)
    share = tl.exp(log_share)
    slope = -pull - spread * (tl.where(share > 0, log_share, 0.0) + tl.load(ENTROPY + row))
    g = share * slope + tl.where(column == token, pull, 0.0)
    g = tl.where(read, g, 0.0).to(GRADIENT.dtype.element_ty)
    tl.store(GRADIENT + row * gradient_stride + column, g, mask=column < classes)
