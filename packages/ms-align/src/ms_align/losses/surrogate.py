"""The clipped surrogate that PPO and its kin share, and the ways to average over tokens.

Shapes: B rows, S positions; a mask is true where a target is the response's own token.
"""

from typing import Literal

import torch
from torch import Tensor

from ms_align.errors import ConfigError
from ms_align.losses.protocol import IGNORED, Batch

__all__ = ["Aggregation", "clipped", "clipped_share", "divisor", "mask_of", "token_weights"]

Aggregation = Literal["token", "sequence", "constant"]


def mask_of(batch: Batch) -> Tensor:
    """(B, S) bool: which targets count."""
    return batch["targets"] != IGNORED


def clipped(ratios: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-min(r·A, clip(r, 1 - low, 1 + high)·A) (Schulman et al., 2017, equation 7).

    Args:
        ratios: π/μ, any shape; takes the gradient.
        advantages: of the same shape.
        low: how far below 1 a ratio still counts.
        high: how far above.
    """
    return torch.maximum(-ratios * advantages, -ratios.clamp(1 - low, 1 + high) * advantages)


def clipped_share(ratios: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """1 where the clip takes the gradient away, 0 elsewhere; of the shape of `ratios`."""
    above = (ratios > 1 + high) & (advantages > 0)
    below = (ratios < 1 - low) & (advantages < 0)
    return (above | below).float()


def token_weights(mask: Tensor, aggregation: str) -> Tensor:
    """How much each token counts, (B, S) float32.

    `token` counts each alike; `sequence` each response alike, its tokens sharing; `constant` each
    token alike, but divided by a fixed length, so that no response's length changes its weight.
    """
    weights = mask.float()
    if aggregation == "sequence":
        return weights / weights.sum(1, keepdim=True).clamp(min=1)
    return weights


def divisor(mask: Tensor, aggregation: str, longest: int | None) -> float:
    """What the sum of `token_weights` times losses is divided by.

    Args:
        mask: (B, S).
        aggregation: an `Aggregation`.
        longest: tokens of the longest response there may be; for `constant`.

    Raises:
        ConfigError: there is no such aggregation.
    """
    if aggregation == "token":
        return float(mask.sum())
    if aggregation == "sequence":
        return float(mask.any(1).sum())
    if aggregation == "constant" and longest:
        return float(mask.any(1).sum() * longest)
    raise ConfigError(f"aggregation is {aggregation!r}; give 'token', 'sequence' or 'constant'")
