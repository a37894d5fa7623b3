"""Draw the next token, with its log-probability.

Two log-probabilities of each drawn token are kept. `logprobs` is of the *policy*, softmax(logits /
temperature), which is what the training forward computes again: the first ratio is 1.
`sampling_logprobs` is of the distribution it was really drawn from, after top-k, top-p and min-p
have cut the tail and the rest was scaled up. Without a cut they are equal. Shapes: B rows, V
vocabulary.
"""

import torch
from attrs import frozen
from torch import Tensor

from ms_align.generation.sampling import Sampling

BLOCK = 64
"""Tokens whose probabilities are summed before the block of the drawn one is looked into."""


@frozen(kw_only=True)
class Drawn:
    """One token a row."""

    tokens: Tensor
    """(B,) int64."""
    logprobs: Tensor
    """(B,) float32, of the policy."""
    sampling_logprobs: Tensor
    """(B,) float32, of the distribution it was drawn from."""


def draw(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> Drawn:
    """Draw a token a row by inverting the cumulative distribution at one number a row.

    Args:
        logits: (B, V), any float dtype.
        sampling: how.
        uniforms: (B,) float64 from [0, 1).
    """
    scores = logits.float()
    if sampling.temperature == 0.0:
        tokens = scores.argmax(1)
        logprobs = _logprobs(scores, tokens)
        return Drawn(tokens=tokens, logprobs=logprobs, sampling_logprobs=torch.zeros_like(logprobs))
    if sampling.temperature != 1.0:
        scores = scores / sampling.temperature
    if not sampling.cuts:
        probabilities = scores.softmax(1)
        tokens = _invert(probabilities, uniforms)
        # A drawn token's probability is never 0, and known to a few roundings: so is its logarithm.
        logprobs = probabilities.gather(1, tokens[:, None])[:, 0].log()
        return Drawn(tokens=tokens, logprobs=logprobs, sampling_logprobs=logprobs)
    kept = cut(scores, sampling)
    tokens = _invert(kept.softmax(1), uniforms)
    return Drawn(
        tokens=tokens,
        logprobs=_logprobs(scores, tokens),
        sampling_logprobs=_logprobs(kept, tokens),
    )


def cut(scores: Tensor, sampling: Sampling) -> Tensor:
    """Set scores (B, V) to -inf where a token is never drawn; top-k, then top-p, then min-p."""
    if sampling.top_k is not None and sampling.top_k < scores.shape[1]:
        least = scores.topk(sampling.top_k, dim=1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, index = scores.sort(dim=1, descending=True)
        probabilities = ordered.softmax(1)
        before = probabilities.cumsum(1) - probabilities
        dropped = torch.zeros_like(scores, dtype=torch.bool)
        dropped.scatter_(1, index, before >= sampling.top_p)
        scores = scores.masked_fill(dropped, -torch.inf)
    if sampling.min_p > 0.0:
        probabilities = scores.softmax(1)
        least = sampling.min_p * probabilities.amax(1, keepdim=True)
        scores = scores.masked_fill(probabilities < least, -torch.inf)
    return scores


def _logprobs(scores: Tensor, tokens: Tensor) -> Tensor:
    return scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(1)


def _invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Find the first token at which the sum of probabilities (B, V) exceeds `uniforms` (B,).

    Sums by blocks first: two short cumulative sums in float64 instead of a long one.
    """
    rows, vocabulary = probabilities.shape
    if vocabulary % BLOCK:
        probabilities = torch.nn.functional.pad(probabilities, (0, -vocabulary % BLOCK))
    blocks = probabilities.view(rows, -1, BLOCK)
    of_blocks = blocks.sum(2).double().cumsum(1)
    wanted = uniforms[:, None].to(of_blocks) * of_blocks[:, -1:]
    block = torch.searchsorted(of_blocks, wanted, right=True).clamp(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, of_blocks.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(rows, device=blocks.device), block[:, 0]].double().cumsum(1)
    at = torch.searchsorted(inside, wanted - before, right=True)[:, 0]
    # Rounding between the two sums may point past the block: its last token that has any mass.
    last = BLOCK - 1 - (inside == inside[:, -1:]).sum(1) + 1
    return block[:, 0] * BLOCK + torch.minimum(at, last)
