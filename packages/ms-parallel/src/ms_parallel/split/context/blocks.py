"""Attention of some queries to some keys as a part of all: its result, and how much it weighs.

Parts of one row's keys are put together by the logsumexp of their scores: with L the logaddexp of
L1 and L2 the whole is O1·e^(L1-L) + O2·e^(L2-L) (Liu et al., "Ring Attention", arXiv:2310.01889).
Given the final O and L, the gradient of each part is found from that part alone.

Shapes: n queries, m keys, Hq heads of queries, Hk of keys, G = Hq/Hk.
"""

import torch
from attrs import frozen
from torch import Tensor

from ms_parallel.operators.cpu import widen


@frozen(kw_only=True)
class Scores:
    """How scores are made."""

    scale: float
    softcap: float | None = None
    """What they are bent to stay below."""

    def of(self, q: Tensor, k: Tensor, seen: Tensor | None) -> Tensor:
        """Compute the scores (Hk, G, n, m), -inf where a key is not seen.

        Args:
            q: (n, Hq, D).
            k: (m, Hk, D).
            seen: (n, m), or None for all.
        """
        scores = by_group(q, k.shape[1]) @ widen(k).permute(1, 2, 0).unsqueeze(1) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return scores if seen is None else scores.masked_fill(~seen, -torch.inf)


def by_group(x: Tensor, groups: int) -> Tensor:
    """Turn (n, Hq, D) into (Hk, G, n, D), in float32 or float64."""
    return widen(x).reshape(len(x), groups, -1, x.shape[2]).permute(1, 2, 0, 3)


def by_position(x: Tensor) -> Tensor:
    """Turn (Hk, G, n, D) into (n, Hq, D)."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def attend_part(
    scores: Scores, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the result (n, Hq, Dv) of these keys alone, and their scores' logsumexp (n, Hq).

    A query that sees none of them has 0 and -inf.
    """
    found = scores.of(q, k, seen)
    total = found.logsumexp(-1, keepdim=True)
    shares = (found - total.masked_fill(total == -torch.inf, 0.0)).exp()
    out = shares @ widen(v).transpose(0, 1).unsqueeze(1)
    return by_position(out), by_position(total)[..., 0]


def merge(out: Tensor, total: Tensor, more: Tensor, more_total: Tensor) -> None:
    """Put another part's result and logsumexp to those so far, in place."""
    both = torch.logaddexp(total, more_total)
    finite = both.masked_fill(both == -torch.inf, 0.0)
    out *= (total - finite).exp().unsqueeze(-1)
    out += more * (more_total - finite).exp().unsqueeze(-1)
    total.copy_(both)


def part_gradients(
    scores: Scores,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    final: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what one part adds to the gradients of q, k and v.

    Args:
        scores: how they are made.
        q: (n, Hq, D).
        k: (m, Hk, D).
        v: (m, Hk, Dv).
        seen: (n, m), or None for all.
        final: the gradient (n, Hq, Dv) of the whole result, the logsumexp (n, Hq) over all parts,
            and the sum (n, Hq) of the gradient's product with the result.
    """
    groups = k.shape[1]
    gradient, total, slope = (by_group(x.reshape(*x.shape[:2], -1), groups) for x in final)
    found = scores.of(q, k, seen)
    shares = (found - total).exp()
    of_v = (shares.transpose(-1, -2) @ gradient).sum(1).transpose(0, 1)
    of_scores = shares * (gradient @ widen(v).permute(1, 2, 0).unsqueeze(1) - slope)
    if scores.softcap is not None:
        bent = found.masked_fill(found == -torch.inf, 0.0) / scores.softcap
        of_scores = of_scores * (1.0 - bent.square())
    of_scores = of_scores * scores.scale
    of_q = by_position(of_scores @ widen(k).transpose(0, 1).unsqueeze(1))
    of_k = (of_scores.transpose(-1, -2) @ by_group(q, groups)).sum(1).transpose(0, 1)
    return of_q, of_k, of_v
