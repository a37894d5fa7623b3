"""Flash attention for training, and for one new position over paged keys and values."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["BODIES"]

UNLIMITED = 2**31 - 1
COMPRESSED = 2048
"""Side of the triangular mask that stands for one of any size."""
DEFAULT, ALL, LEFT_UP, RIGHT_DOWN, BAND = range(5)


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shift: Tensor | None,
    dropout: Tensor | None,
    padding: Tensor | None,
    mask: Tensor | None,
    prefix: list[int] | None,
    scale: float,
    keep: float,
    before: int,
    after: int,
    heads: int,
    layout: str,
    inner_precise: int,
    sparse_mode: int,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    softmax_out: Tensor,
    out: Tensor,
) -> None:
    """``softmax(scale · query keyᵀ, masked) value``, with the largest score and sum of each row."""
    _plain(shift, dropout, padding, prefix, keep)
    q, k, v = (_heads_first(each, layout, heads) for each in (query, key, value))
    scores = _scores(q, k, scale, mask, sparse_mode, before, after)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    softmax_max.copy_(top.expand_as(softmax_max))
    softmax_sum.copy_(total.expand_as(softmax_sum))
    result = (weights / total) @ _repeat(v, q)
    out.copy_(result.transpose(1, 2) if layout == "BSND" else result)


def flash_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slope: Tensor,
    shift: Tensor | None,
    dropout: Tensor | None,
    padding: Tensor | None,
    mask: Tensor | None,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    softmax_in: Tensor | None,
    attention: Tensor,
    prefix: list[int] | None,
    scale: float,
    keep: float,
    before: int,
    after: int,
    heads: int,
    layout: str,
    inner_precise: int,
    sparse_mode: int,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dshift: Tensor | None,
) -> None:
    """Gradients of `flash_attention`, from what it kept of each row."""
    _plain(shift, dropout, padding, prefix, keep)
    q, k, v, dy, out = (
        _heads_first(each, layout, heads) for each in (query, key, value, slope, attention)
    )
    scores = _scores(q, k, scale, mask, sparse_mode, before, after)
    shares = (scores - softmax_max[..., :1]).exp() / softmax_sum[..., :1]
    turn = shares * (dy @ _repeat(v, q).transpose(-1, -2) - (dy * out).sum(-1, keepdim=True))
    found = (
        turn @ _repeat(k, q) * scale,
        _gather(turn.transpose(-1, -2) @ q * scale, k),
        _gather(shares.transpose(-1, -2) @ dy, v),
    )
    for gradient, result in zip(found, (dq, dk, dv), strict=True):
        result.copy_(gradient.transpose(1, 2) if layout == "BSND" else gradient)


def incremental(
    query: Tensor,
    key: list[Tensor],
    value: list[Tensor],
    shift: Tensor | None,
    mask: Tensor | None,
    lengths: list[int],
    dequant_scale1: Tensor | None,
    quant_scale1: Tensor | None,
    dequant_scale2: Tensor | None,
    quant_scale2: Tensor | None,
    quant_offset2: Tensor | None,
    antiquant_scale: Tensor | None,
    antiquant_offset: Tensor | None,
    table: Tensor,
    padding_size: Tensor | None,
    heads: int,
    scale: float,
    layout: str,
    key_heads: int,
    page: int,
    inner_precise: int,
    out: Tensor,
) -> None:
    """One query a sequence over `lengths` positions in pages (pages, page, key heads · width)."""
    if layout != "BSH" or shift is not None or mask is not None or quant_scale2 is not None:
        raise ValueError("only plain BSH queries over pages have a body here")
    batch, width = query.shape[0], query.shape[2] // heads
    for row in range(batch):
        pages = table[row, : -(-lengths[row] // page)].long()
        k, v = (
            each[0][pages].float().reshape(-1, key_heads, width)[: lengths[row]].movedim(0, 1)
            for each in (key, value)
        )
        q = query[row].float().view(heads, 1, width)
        k, v = (each.repeat_interleave(heads // key_heads, 0) for each in (k, v))
        shares = (q @ k.transpose(-1, -2) * scale).softmax(-1)
        out[row].copy_((shares @ v).reshape(1, -1))


def _plain(
    shift: Tensor | None,
    dropout: Tensor | None,
    padding: Tensor | None,
    prefix: list[int] | None,
    keep: float,
) -> None:
    odd = [each for each in (shift, dropout, padding) if each is not None and each.numel()]
    if odd or prefix or keep != 1:
        raise ValueError("biases, dropout and prefixes have no body here")


def _heads_first(given: Tensor, layout: str, heads: int) -> Tensor:
    """(B, heads, S, D) in float32."""
    if layout not in ("BSND", "BNSD"):
        raise ValueError(f"layout {layout} has no body here, only BSND and BNSD")
    return (given.transpose(1, 2) if layout == "BSND" else given).float()


def _repeat(keys: Tensor, queries: Tensor) -> Tensor:
    return keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)


def _gather(gradient: Tensor, keys: Tensor) -> Tensor:
    """Sum over the queries' heads that share a head of keys."""
    batch, _, places, width = gradient.shape
    return gradient.view(batch, keys.shape[1], -1, places, width).sum(2)


def _scores(
    q: Tensor,
    k: Tensor,
    scale: float,
    mask: Tensor | None,
    sparse_mode: int,
    before: int,
    after: int,
) -> Tensor:
    scores = q @ _repeat(k, q).transpose(-1, -2) * scale
    hidden = _hidden(scores, mask, sparse_mode, before, after)
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def _hidden(
    scores: Tensor, mask: Tensor | None, sparse_mode: int, before: int, after: int
) -> Tensor | None:
    """Which scores are masked: 1 in the mask hides, and without a mask nothing is hidden."""
    queries, keys = scores.shape[-2:]
    if mask is None:
        return None
    if sparse_mode in (DEFAULT, ALL):
        if sparse_mode == DEFAULT and (before, after) != (UNLIMITED, UNLIMITED):
            raise ValueError("a whole mask with a band has no body here")
        return mask.bool().expand(scores.shape[0], -1, queries, keys) if mask.ndim == 4 else mask
    triangle = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)
    if mask.shape != triangle.shape or not torch.equal(mask.bool(), triangle):
        raise ValueError(f"sparse_mode {sparse_mode} wants the upper triangle of side {COMPRESSED}")
    ahead = torch.arange(keys) - torch.arange(queries)[:, None]  # positive for later keys
    if sparse_mode == LEFT_UP:
        return ahead > 0
    ahead = ahead - (keys - queries)
    if sparse_mode == RIGHT_DOWN:
        return ahead > 0
    if sparse_mode == BAND:
        return (ahead > after) | (-ahead > before)
    raise ValueError(f"sparse_mode {sparse_mode} has no body here")


BODIES: dict[str, Callable[..., None]] = {
    "aclnnFlashAttentionScore": flash_attention,
    "aclnnFlashAttentionScoreGrad": flash_attention_grad,
    "aclnnIncreFlashAttentionV4": incremental,
}
