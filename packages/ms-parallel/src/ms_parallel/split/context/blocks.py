"""Attention of some queries to some keys, as a partial result that can be merged with others.

Partial results over disjoint keys are merged by the logsumexp of their scores: with
L = logaddexp(L1, L2), O = O1·e^(L1-L) + O2·e^(L2-L) (Liu et al., "Ring Attention",
arXiv:2310.01889). Given the final O and L, the gradients of each part need only that part's keys.

Shapes: n queries, m keys, Hq query heads, Hk key heads, G = Hq/Hk, D head width, Dv value width.
"""

import torch
from attrs import frozen
from torch import Tensor

from ms_parallel.operators.cpu import widen


@frozen(kw_only=True)
class ScoreFunction:
    """Computes attention scores: scaled dot products with an optional soft cap."""

    scale: float
    softcap: float | None = None
    """Scores become softcap · tanh(score / softcap); None for no cap."""

    def compute(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Return scores (Hk, G, n, m), -inf where masked.

        Args:
            q: (n, Hq, D).
            k: (m, Hk, D).
            mask: (n, m), true where a query attends to a key; None for all.
        """
        s = heads_first(q, k.shape[1]) @ widen(k).permute(1, 2, 0).unsqueeze(1) * self.scale
        if self.softcap is not None:
            s = torch.tanh(s / self.softcap) * self.softcap
        return s if mask is None else s.masked_fill(~mask, -torch.inf)


def heads_first(x: Tensor, kv_heads: int) -> Tensor:
    """Permute (n, Hq, D) to (Hk, G, n, D), in float32 or float64."""
    return widen(x).reshape(len(x), kv_heads, -1, x.shape[2]).permute(1, 2, 0, 3)


def positions_first(x: Tensor) -> Tensor:
    """Permute (Hk, G, n, D) to (n, Hq, D)."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def attend_block(
    score: ScoreFunction, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output (n, Hq, Dv) over these keys alone and the logsumexp (n, Hq) of its scores.

    A query that attends to none of the keys has output 0 and logsumexp -inf.
    """
    s = score.compute(q, k, mask)  # (Hk, G, n, m)
    lse = s.logsumexp(-1, keepdim=True)
    p = (s - lse.masked_fill(lse == -torch.inf, 0.0)).exp()  # avoids -inf - -inf = NaN
    out = p @ widen(v).transpose(0, 1).unsqueeze(1)  # (Hk, G, n, Dv)
    return positions_first(out), positions_first(lse)[..., 0]


def merge_blocks(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge another block's output and logsumexp into the accumulated ones, in place."""
    merged = torch.logaddexp(lse, block_lse)
    finite = merged.masked_fill(merged == -torch.inf, 0.0)
    out *= (lse - finite).exp().unsqueeze(-1)
    out += block_out * (block_lse - finite).exp().unsqueeze(-1)
    lse.copy_(merged)


def block_gradients(
    score: ScoreFunction,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    saved: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one block's contributions to the gradients of q, k and v.

    Args:
        score: the score function of the forward pass.
        q: (n, Hq, D).
        k: (m, Hk, D).
        v: (m, Hk, Dv).
        mask: (n, m), or None for all.
        saved: gradient of the final output (n, Hq, Dv), logsumexp (n, Hq) over all blocks, and
            delta (n, Hq), the sum of the gradient times the final output.
    """
    kv_heads = k.shape[1]
    do, lse, delta = (heads_first(x.reshape(*x.shape[:2], -1), kv_heads) for x in saved)
    s = score.compute(q, k, mask)
    p = (s - lse).exp()  # (Hk, G, n, m), normalized over all blocks
    dv = (p.transpose(-1, -2) @ do).sum(1).transpose(0, 1)
    ds = p * (do @ widen(v).permute(1, 2, 0).unsqueeze(1) - delta)
    if score.softcap is not None:  # d tanh = 1 - tanh²
        tanh = s.masked_fill(s == -torch.inf, 0.0) / score.softcap
        ds = ds * (1.0 - tanh.square())
    ds = ds * score.scale
    dq = positions_first(ds @ widen(k).transpose(0, 1).unsqueeze(1))
    dk = (ds.transpose(-1, -2) @ heads_first(q, kv_heads)).sum(1).transpose(0, 1)
    return dq, dk, dv
