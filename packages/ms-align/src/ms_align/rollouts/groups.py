"""What trainers of groups share: scores of whole responses. Shapes: N responses, S positions."""

import torch
from torch import Tensor

from ms_align.rollouts.experience import Experience

__all__ = ["spread_over_tokens", "with_divergence"]


def with_divergence(experience: Experience, kl_coeff: float, estimator: str) -> Tensor:
    """Scores less β times each response's KL, (N,); NaN where a response is left out."""
    scores = experience.scores.masked_fill(~experience.kept, torch.nan)
    if kl_coeff:
        scores = scores - kl_coeff * experience.divergence(estimator).sum(1)
    return scores


def spread_over_tokens(advantages: Tensor, experience: Experience) -> Tensor:
    """Each response's advantage at its tokens, (N, S) float32, 0 elsewhere."""
    return advantages[:, None].float() * experience.mask
