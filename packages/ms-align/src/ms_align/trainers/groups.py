"""What trainers of groups share: scores of whole responses. Shapes: N responses, S positions."""

import torch
from torch import Tensor

from ms_align.trainers.experience import Experience

__all__ = ["spread_over_tokens", "with_divergence"]


def with_divergence(
    experience: Experience, kl_coeff: float, estimator: str, group_size: int
) -> Tensor:
    """Scores less β times each response's KL, (N,); a left-out one gets its group's mean."""
    scores = experience.scores
    if kl_coeff:
        scores = scores - kl_coeff * experience.divergence(estimator).sum(1)
    groups = scores.view(-1, group_size)
    mean = torch.nan_to_num(groups.nanmean(dim=1, keepdim=True))
    return torch.where(groups.isnan(), mean, groups).flatten()


def spread_over_tokens(advantages: Tensor, experience: Experience) -> Tensor:
    """Each response's advantage at its tokens, (N, S) float32, 0 elsewhere."""
    return advantages[:, None].float() * experience.mask
