"""Forward and backward kernels: log-probabilities of tokens and entropies of rows of logits."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first", "ignore_index"])
def log_probs_forward(
    first,
    LOGITS,
    TOKENS,
    LOG_PROBS,
    ENTROPY,
    LSE,
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
    m_i = -float("inf")  # running maximum
    l_i = 0.0  # running sum of exp(x - m_i)
    px_sum = 0.0  # running sum of exp(x - m_i) · x
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < classes
        x = tl.load(LOGITS + column, mask=inside, other=-float("inf")).to(tl.float32) * beta
        m_new = tl.maximum(m_i, tl.max(x, 0))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # -inf - -inf would be NaN
        p = tl.exp(x - shift)
        alpha = tl.exp(m_i - shift)  # rescales the sums under the old maximum
        l_i = l_i * alpha + tl.sum(p, 0)
        # 0 · -inf is NaN, but a class masked by -inf must add 0.
        px_sum = px_sum * alpha + tl.sum(tl.where(p > 0, p * x, 0.0), 0)
        m_i = m_new
    lse = m_i + tl.log(l_i)  # log Σ exp(x)
    valid = token != ignore_index
    fits = (token >= 0) & (token < classes)
    token_logit = tl.load(LOGITS + token, mask=fits, other=float("nan")).to(tl.float32) * beta
    tl.store(LOG_PROBS + row, tl.where(valid, token_logit - lse, 0.0))
    # H = -Σ p log p = lse - Σ p x
    tl.store(ENTROPY + row, tl.where(valid, lse - px_sum / l_i, 0.0))
    tl.store(LSE + row, lse)


@triton.jit(do_not_specialize=["first", "ignore_index"])
def log_probs_backward(
    first,
    LOGITS,
    TOKENS,
    LSE,
    ENTROPY,
    DLOGP,
    DENTROPY,
    GRADIENT,
    classes,
    stride,
    gradient_stride,
    ignore_index,
    beta,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK columns of one row of GRADIENT.

    d log p[t] = e_t - p and dH = -p · (log p + H), scaled by the row's DLOGP, DENTROPY and beta.
    """
    tile = first + tl.program_id(0)
    blocks = tl.cdiv(classes, BLOCK)
    row = (tile // blocks).to(tl.int64)
    column = (tile % blocks) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(TOKENS + row)
    dlogp = tl.load(DLOGP + row) * beta
    dentropy = tl.load(DENTROPY + row) * beta
    # An ignored row is not read: it may contain NaN.
    read = column < tl.where(token == ignore_index, 0, classes)
    x = tl.load(LOGITS + row * stride + column, mask=read, other=0.0).to(tl.float32) * beta
    log_p = x - tl.load(LSE + row)
    p = tl.exp(log_p)
    scale = -dlogp - dentropy * (tl.where(p > 0, log_p, 0.0) + tl.load(ENTROPY + row))
    g = p * scale + tl.where(column == token, dlogp, 0.0)
    g = tl.where(read, g, 0.0).to(GRADIENT.dtype.element_ty)
    tl.store(GRADIENT + row * gradient_stride + column, g, mask=column < classes)
