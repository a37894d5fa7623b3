"""Importance weights of tokens sampled by another implementation of the policy.

A server computes the policy's probabilities with other kernels or another precision, so it samples
from μ, close to the policy π. Weighting a token's loss by π/μ corrects the gradient to that of
responses sampled from π; the limits trade bias for variance (Yao et al., 2025, "Your efficient RL
framework secretly brings you off-policy RL training"). Modes and limits are TRL's. Shapes: N
responses, S positions.
"""

from typing import Final

from torch import Tensor

MAX_LOG_RATIO: Final = 20.0
"""exp beyond this is far outside any useful limit, and its product may overflow."""


def importance_weights(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    mask: Tensor,
    *,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the weight of each token, and whether a limit applied to it, (N, S) each.

    Args:
        logprobs: log π of each token, (N, S).
        sampling_logprobs: log μ of each token, (N, S).
        mask: True at response tokens, (N, S).
        mode: `token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask`: ratios of
            tokens or of entire responses; `truncate` clamps them to the limits and `mask` gives
            those outside the weight 0.
        clip_min: lower limit of the ratios; None for none.
        clip_max: upper limit of the ratios; None for none.
    """
    log_ratios = (logprobs - sampling_logprobs).masked_fill(~mask, 0.0)
    if mode.startswith("sequence"):
        log_ratios = log_ratios.sum(1, keepdim=True).expand_as(log_ratios)
    ratios = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low = 0.0 if clip_min is None else clip_min
    high = float("inf") if clip_max is None else clip_max
    outside = ((ratios < low) | (ratios > high)) & mask
    if mode.endswith("mask"):
        return ratios.masked_fill(outside, 0.0) * mask, outside
    return ratios.clamp(low, high) * mask, outside
