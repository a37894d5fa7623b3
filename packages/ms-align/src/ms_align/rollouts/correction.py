"""Correction of a rollout that was not sampled by the current policy.

There are three policies: the sampler μ, on a server or with earlier weights; the proximal policy
π₀, which is the policy at the start of the rollout's updates; and the policy π being updated. In
the default (decoupled) mode, the loss clips the ratio π/π₀ and is weighted by π₀/μ (Hilton et al.,
2021, "Batch size-invariance for policy optimization"). In bypass mode it clips π/μ. Shapes: N
responses, S positions.
"""

import torch
from attrs import frozen
from torch import Tensor

from ms_align.losses.importance import importance_weights, off_policy_mask, rejections
from ms_align.rollouts.options import RolloutOptions


@frozen(kw_only=True)
class Correction:
    """Changes to the columns of the policy loss, and their metrics."""

    weights: Tensor
    """(N, S) float32, factor of each token's advantage; 0 for rejected tokens."""
    old_logprobs: Tensor
    """(N, S) float32, denominator of the ratio that the loss clips."""
    metrics: dict[str, float]


def correct(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    options: RolloutOptions,
) -> Correction:
    """Weight, reject or clip tokens by the policy-to-sampler ratio.

    Args:
        logprobs: log π₀ of each token, (N, S).
        sampling_logprobs: log μ of each token, (N, S).
        mask: True at response tokens, (N, S).
        advantages: (N, S).
        options: modes and limits of the correction.
    """
    log_ratios = (logprobs - sampling_logprobs)[mask]  # (number of response tokens,)
    metrics = {
        "sampler_difference": float(log_ratios.abs().mean()),
        # k3 estimate of KL(μ || π₀) from tokens that μ sampled
        "sampler_kl": float((torch.expm1(log_ratios) - log_ratios).mean()),
    }
    weights = mask.to(logprobs.dtype)
    # In bypass mode the loss's own ratio π/μ corrects, so a weight would correct twice.
    if options.importance_sampling_correction and not options.bypass_mode:
        weights, is_limited = importance_weights(
            logprobs,
            sampling_logprobs,
            mask,
            mode=options.importance_sampling_mode,
            clip_min=options.importance_sampling_clip_min,
            clip_max=options.importance_sampling_clip_max,
        )
        metrics["sampler_clip_fraction"] = float(is_limited[mask].float().mean())
    rejected = torch.zeros_like(mask)  # (N, S) bool
    if options.rollout_rs is not None and options.rollout_rs_threshold is not None:
        rejected = rejected | rejections(
            logprobs,
            sampling_logprobs,
            mask,
            mode=options.rollout_rs,
            threshold=options.rollout_rs_threshold,
        )
    if options.off_policy_mask_threshold is not None:
        threshold = options.off_policy_mask_threshold
        rejected = rejected | off_policy_mask(
            logprobs, sampling_logprobs, mask, advantages, threshold
        )
    if options.rollout_rs or options.off_policy_mask_threshold is not None:
        metrics["sampler_reject_fraction"] = float(rejected[mask].float().mean())
    return Correction(
        weights=weights.masked_fill(rejected, 0.0),
        old_logprobs=sampling_logprobs if options.bypass_mode else logprobs,
        metrics=metrics,
    )
