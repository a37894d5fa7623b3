"""Flash attention for training, and decoding over paged keys and values."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["BODIES"]

UNLIMITED = 2**31 - 1
COMPRESSED = 2048
"""Side of the triangular mask that CANN expands to any size."""
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
    """``softmax(masked(scale * query @ key.T)) @ value``, with each row's maximum and sum."""
    _require_plain(shift, dropout, padding, prefix, keep)
    q, k, v = (_heads_first(t, layout, heads) for t in (query, key, value))
    scores = _scores(q, k, scale, mask, sparse_mode, before, after)
    row_max = scores.amax(-1, keepdim=True)
    weights = (scores - row_max).exp()
    row_sum = weights.sum(-1, keepdim=True)
    softmax_max.copy_(row_max.expand_as(softmax_max))
    softmax_sum.copy_(row_sum.expand_as(softmax_sum))
    result = (weights / row_sum) @ _repeat(v, q)
    out.copy_(result.transpose(1, 2) if layout == "BSND" else result)


def flash_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
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
    """Gradients of `flash_attention`, from the saved row maximum and sum."""
    _require_plain(shift, dropout, padding, prefix, keep)
    q, k, v, dy, out = (
        _heads_first(t, layout, heads) for t in (query, key, value, grad, attention)
    )
    scores = _scores(q, k, scale, mask, sparse_mode, before, after)
    p = (scores - softmax_max[..., :1]).exp() / softmax_sum[..., :1]
    ds = p * (dy @ _repeat(v, q).transpose(-1, -2) - (dy * out).sum(-1, keepdim=True))
    grads = (
        ds @ _repeat(k, q) * scale,
        _sum_groups(ds.transpose(-1, -2) @ q * scale, k),
        _sum_groups(p.transpose(-1, -2) @ dy, v),
    )
    for gradient, result in zip(grads, (dq, dk, dv), strict=True):
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
    """One query per sequence over `lengths` positions in pages (pages, page, key heads * width)."""
    if layout != "BSH" or shift is not None or mask is not None or quant_scale2 is not None:
        raise ValueError("only plain BSH queries over pages are implemented")
    batch, width = query.shape[0], query.shape[2] // heads
    for row in range(batch):
        pages = table[row, : -(-lengths[row] // page)].long()
        k, v = (
            pages_of[0][pages].float().reshape(-1, key_heads, width)[: lengths[row]].movedim(0, 1)
            for pages_of in (key, value)
        )
        q = query[row].float().view(heads, 1, width)
        k, v = (t.repeat_interleave(heads // key_heads, 0) for t in (k, v))
        p = (q @ k.transpose(-1, -2) * scale).softmax(-1)
        out[row].copy_((p @ v).reshape(1, -1))


def _require_plain(
    shift: Tensor | None,
    dropout: Tensor | None,
    padding: Tensor | None,
    prefix: list[int] | None,
    keep: float,
) -> None:
    unsupported = [t for t in (shift, dropout, padding) if t is not None and t.numel()]
    if unsupported or prefix or keep != 1:
        raise ValueError("biases, dropout and prefixes are not implemented")


def _heads_first(x: Tensor, layout: str, heads: int) -> Tensor:
    """Return (B, heads, S, D) in float32."""
    if layout not in ("BSND", "BNSD"):
        raise ValueError(f"layout must be BSND or BNSD, got {layout}")
    return (x.transpose(1, 2) if layout == "BSND" else x).float()


def _repeat(keys: Tensor, queries: Tensor) -> Tensor:
    return keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)


def _sum_groups(gradient: Tensor, keys: Tensor) -> Tensor:
    """Sum over the query heads that share a key head."""
    batch, _, positions, width = gradient.shape
    return gradient.view(batch, keys.shape[1], -1, positions, width).sum(2)


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
    masked = _attention_mask(scores, mask, sparse_mode, before, after)
    return scores if masked is None else scores.masked_fill(masked, -torch.inf)


def _attention_mask(
    scores: Tensor, mask: Tensor | None, sparse_mode: int, before: int, after: int
) -> Tensor | None:
    """Return the masked scores: 1 in the mask hides a score, and None hides none."""
    queries, keys = scores.shape[-2:]
    if mask is None:
        return None
    if sparse_mode in (DEFAULT, ALL):
        if sparse_mode == DEFAULT and (before, after) != (UNLIMITED, UNLIMITED):
            raise ValueError("a full mask together with a band is not implemented")
        return mask.bool().expand(scores.shape[0], -1, queries, keys) if mask.ndim == 4 else mask
    triangle = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)
    if mask.shape != triangle.shape or not torch.equal(mask.bool(), triangle):
        raise ValueError(f"sparse_mode {sparse_mode} needs the upper triangle of side {COMPRESSED}")
    ahead = torch.arange(keys) - torch.arange(queries)[:, None]  # positive for later keys
    if sparse_mode == LEFT_UP:
        return ahead > 0
    ahead = ahead - (keys - queries)
    if sparse_mode == RIGHT_DOWN:
        return ahead > 0
    if sparse_mode == BAND:
        return (ahead > after) | (-ahead > before)
    raise ValueError(f"sparse_mode {sparse_mode} is not implemented")


BODIES: dict[str, Callable[..., None]] = {
    "aclnnFlashAttentionScore": flash_attention,
    "aclnnFlashAttentionScoreGrad": flash_attention_grad,
    "aclnnIncreFlashAttentionV4": incremental,
}
