"""Log-probabilities and entropies of many tokens from their logits, without a second big tensor.

A chunk of rows stays in the processor's cache from the first pass over it to the last, and the
backward writes its gradient chunk by chunk. Shapes: N tokens, V vocabulary.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["losses_and_entropies"]

CHUNK_BYTES = 1 << 20
"""Logits of one chunk: what a core's own cache holds beside its other guests."""


def losses_and_entropies(
    logits: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """-log p(target) and the entropy of p = softmax(logits / temperature).

    Args:
        logits: (N, V), any float dtype.
        targets: (N,) int64, each a token.
        temperature: above 0.

    Returns:
        Losses (N,) float32, which take a gradient; entropies (N,) float32 in nats, which don't.
    """
    return cast(
        tuple[Tensor, Tensor],
        _Statistics.apply(logits, targets, temperature),  # type: ignore[no-untyped-call]
    )


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Any:
        """Losses and entropies; keeps the logits and their log-normalisers."""
        count, vocabulary = logits.shape
        normalisers = torch.empty(count, dtype=torch.float32, device=logits.device)
        hits, entropies = torch.empty_like(normalisers), torch.empty_like(normalisers)
        rows = max(1, CHUNK_BYTES // (4 * vocabulary))
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            scores = logits[part].float()
            scores = scores / temperature if temperature != 1.0 else scores
            highest = scores.amax(1, keepdim=True)
            shifted = scores - highest
            weights = shifted.exp()
            total = weights.sum(1)
            normalisers[part] = total.log() + highest[:, 0]
            hits[part] = scores.gather(1, targets[part, None])[:, 0]
            mean = weights.mul_(shifted).sum(1) / total
            entropies[part] = total.log() - mean
        ctx.save_for_backward(logits, targets, normalisers)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.mark_non_differentiable(entropies)
        return normalisers - hits, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        """(p - onehot(target)) / temperature, times each token's gradient."""
        logits, targets, normalisers = ctx.saved_tensors
        scale = gradient / ctx.temperature
        of_logits = torch.empty_like(logits)
        for start in range(0, logits.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            scores = logits[part].float()
            scores = scores / ctx.temperature if ctx.temperature != 1.0 else scores
            error = (scores - normalisers[part, None]).exp_()
            error.scatter_add_(1, targets[part, None], error.new_full((error.shape[0], 1), -1.0))
            of_logits[part] = error.mul_(scale[part, None])
        return of_logits, None, None
