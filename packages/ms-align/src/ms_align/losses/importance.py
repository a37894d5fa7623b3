"""Off-policy corrections for tokens that were not sampled by the current policy.

A server computes the policy's probabilities with other kernels or another precision, and
asynchronous generation uses earlier weights, so tokens come from a sampler μ that is only close to
the policy π. Weighting a token's loss by π/μ makes the gradient unbiased; limits on the weights
trade bias for variance (Yao et al., 2025, "Your efficient RL framework secretly brings you
off-policy RL training"). Modes and limits of the weights follow TRL, and rejections follow verl.
Shapes: N responses, S positions.
"""

import math
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


def rejections(
    logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor, *, mode: str, threshold: float
) -> Tensor:
    """Return the mask of tokens to reject as too far from the policy, (N, S) bool.

    Args:
        logprobs: log π of each token, (N, S).
        sampling_logprobs: log μ of each token, (N, S).
        mask: True at response tokens, (N, S).
        mode: level and estimator, with verl's names. k1 is log π/μ and k3 is π/μ - 1 - log π/μ, of
            each `token`, or their sum, mean or maximum over a response (`seq_sum`, `seq_mean`,
            `seq_max`), which rejects all its tokens. `seq_mean_k1` is the log of the geometric mean
            of the ratios.
        threshold: limit of k3; for k1, a ratio: log π/μ is rejected outside ±log threshold.
    """
    level, _, estimator = mode.rpartition("_")
    log_ratios = (logprobs - sampling_logprobs).masked_fill(~mask, 0.0)
    values, limit = log_ratios, math.log(threshold) if estimator == "k1" else threshold
    if estimator == "k3":
        values = log_ratios.clamp(max=MAX_LOG_RATIO).expm1() - log_ratios  # (N, S), >= 0
    if level == "seq_sum":
        values = values.sum(1, keepdim=True).expand_as(mask)
    if level == "seq_mean":
        values = values.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    if level == "seq_max":
        values = values.amax(1, keepdim=True)
    return (values.abs() > limit) & mask


def off_policy_mask(
    logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor, advantages: Tensor, threshold: float
) -> Tensor:
    """Return the mask of tokens with a negative advantage in off-policy responses, (N, S) bool.

    A response is off-policy if the mean of log μ/π over its tokens exceeds `threshold`, in nats per
    token (DeepSeek-V3.2, 2025, section 3.1). All tensors are (N, S).
    """
    log_ratios = (sampling_logprobs - logprobs).masked_fill(~mask, 0.0)
    # Tokens with a positive advantage are never masked.
    distance = log_ratios.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return (distance > threshold) & (advantages < 0) & mask
