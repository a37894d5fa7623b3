"""Samples the next token and computes its log-probabilities.

Two log-probabilities of each sampled token are returned. `logprobs` is under the *policy*,
softmax(logits / temperature), which a training forward pass reproduces, so that the first ratio is
1. `sampling_logprobs` is under the distribution sampled from, after top-k, top-p and min-p have
truncated and renormalized it. Without truncation they are equal. Shapes: B rows, V vocabulary.
"""

import torch
from attrs import frozen
from torch import Tensor

from ms_align.generation.sampling import Sampling

BLOCK = 64
"""Block size of the cumulative sum over the vocabulary."""


@frozen(kw_only=True)
class SampledTokens:
    """One sampled token per row."""

    tokens: Tensor
    """(B,) int64."""
    logprobs: Tensor
    """(B,) float32, under the policy."""
    sampling_logprobs: Tensor
    """(B,) float32, under the distribution sampled from."""


def sample_tokens(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> SampledTokens:
    """Sample one token per row by inverting the cumulative distribution.

    Args:
        logits: (B, V), any float dtype.
        sampling: sampling settings.
        uniforms: (B,) float64 from [0, 1), one random number per row.
    """
    # Half precision is too coarse for cumulative probabilities of large vocabularies.
    scores = logits.float()
    if sampling.temperature == 0.0:
        tokens = scores.argmax(1)
        logprobs = _logprobs(scores, tokens)
        return SampledTokens(
            tokens=tokens, logprobs=logprobs, sampling_logprobs=torch.zeros_like(logprobs)
        )
    if sampling.temperature != 1.0:
        scores = scores / sampling.temperature
    if not sampling.truncates:
        probabilities = scores.softmax(1)
        tokens = _inverse_cdf(probabilities, uniforms)
        # The probability of a sampled token is above 0 and accurate to a few ulps.
        logprobs = probabilities.gather(1, tokens[:, None])[:, 0].log()
        return SampledTokens(tokens=tokens, logprobs=logprobs, sampling_logprobs=logprobs)
    truncated = truncate(scores, sampling)
    tokens = _inverse_cdf(truncated.softmax(1), uniforms)
    return SampledTokens(
        tokens=tokens,
        logprobs=_logprobs(scores, tokens),
        sampling_logprobs=_logprobs(truncated, tokens),
    )


def truncate(scores: Tensor, sampling: Sampling) -> Tensor:
    """Set excluded scores (B, V) to -inf, by top-k, then top-p, then min-p."""
    if sampling.top_k is not None and sampling.top_k < scores.shape[1]:
        # Ties with the k-th score are kept.
        threshold = scores.topk(sampling.top_k, dim=1).values[:, -1:]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    if sampling.top_p < 1.0:
        # The most likely token always stays, as `before` is 0 for it.
        sorted_scores, index = scores.sort(dim=1, descending=True)
        probabilities = sorted_scores.softmax(1)
        before = probabilities.cumsum(1) - probabilities  # probability of all more likely tokens
        excluded = torch.zeros_like(scores, dtype=torch.bool)
        excluded.scatter_(1, index, before >= sampling.top_p)
        scores = scores.masked_fill(excluded, -torch.inf)
    if sampling.min_p > 0.0:
        probabilities = scores.softmax(1)
        threshold = sampling.min_p * probabilities.amax(1, keepdim=True)
        scores = scores.masked_fill(probabilities < threshold, -torch.inf)
    return scores


def _logprobs(scores: Tensor, tokens: Tensor) -> Tensor:
    return scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(1)


def _inverse_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first token at which the cumulative probability exceeds `uniforms` (B,).

    Two short float64 cumulative sums, over blocks and within a block, replace a long one.
    """
    rows, vocabulary = probabilities.shape
    if vocabulary % BLOCK:
        probabilities = torch.nn.functional.pad(probabilities, (0, -vocabulary % BLOCK))
    blocks = probabilities.view(rows, -1, BLOCK)
    cdf = blocks.sum(2).double().cumsum(1)  # (B, blocks)
    target = uniforms[:, None].to(cdf) * cdf[:, -1:]
    block = torch.searchsorted(cdf, target, right=True).clamp(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, cdf.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(rows, device=blocks.device), block[:, 0]].double().cumsum(1)
    offset = torch.searchsorted(inside, target - before, right=True)[:, 0]
    # Rounding may place the target beyond the block; then take its last token of nonzero mass.
    last = BLOCK - 1 - (inside == inside[:, -1:]).sum(1) + 1
    return block[:, 0] * BLOCK + torch.minimum(offset, last)
