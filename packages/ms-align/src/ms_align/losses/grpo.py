"""GRPO: the clipped surrogate with one advantage a response, relative to its group.

Shao et al., 2024, equation 3; `aggregation="token"` and an upper clip of its own are DAPO's (Yu et
al., 2025), `"constant"` is that of Liu et al., 2025. Shapes: B rows, S positions.
"""

import torch
from attrs import field, frozen
from torch import Tensor

from ms_align.losses import kl
from ms_align.losses.protocol import Batch, Output
from ms_align.losses.surrogate import (
    Aggregation,
    clipped,
    clipped_share,
    divisor,
    mask_of,
    token_weights,
)
from ms_align.settings import number, one_of, whole

__all__ = ["GRPOLoss"]


@frozen(kw_only=True)
class GRPOLoss:
    """The policy's loss. Reads `targets`, `old_logprobs`, `advantages`, (B, S), target-aligned.

    `reference_logprobs` too, if `kl_coeff` is not 0.
    """

    clip_low: float = field(default=0.2, validator=number())
    clip_high: float = field(default=0.2, validator=number())
    temperature: float = field(default=1.0, validator=number(least=1e-6))
    entropy_coeff: float = field(default=0.0, validator=number())
    kl_coeff: float = field(default=0.0, validator=number())
    kl_estimator: str = "k3_weighted"
    aggregation: Aggregation = field(
        default="token", validator=one_of("token", "sequence", "constant")
    )
    longest: int | None = field(default=None, validator=whole(optional=True))
    """Tokens of the longest response, for `constant`."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """Beside the loss: how far the policy has gone from the one that drew."""
        penalty = ("kl_loss",) if self.kl_coeff else ()
        return ("entropy", "kl_old", "clip_fraction", *penalty)

    def weight(self, batch: Batch) -> float:
        """Tokens or responses, as `aggregation` says."""
        return divisor(mask_of(batch), self.aggregation, self.longest)

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Weighted sum over response tokens, and the figures' sums."""
        mask = mask_of(batch)
        weights = token_weights(mask, self.aggregation)
        old, advantages = batch["old_logprobs"], batch["advantages"]
        logprobs = -output.token_losses(batch["targets"], temperature=self.temperature)
        difference = torch.where(mask, logprobs - old, 0.0)
        ratios = difference.exp()
        losses = clipped(ratios, advantages, self.clip_low, self.clip_high)
        bonus = self.entropy_coeff > 0
        with torch.set_grad_enabled(bonus and torch.is_grad_enabled()):
            entropy = output.entropies(mask, temperature=self.temperature)
        if bonus:
            losses = losses - self.entropy_coeff * entropy
        with torch.no_grad():
            moved = torch.expm1(difference) - difference
            share = clipped_share(ratios, advantages, self.clip_low, self.clip_high)
        told = [entropy, moved, share]
        if self.kl_coeff:
            reference = batch["reference_logprobs"]
            penalty = kl.in_loss(logprobs, reference, old, mask, self.kl_estimator)
            losses = losses + self.kl_coeff * penalty
            told.append(penalty)
        figures = torch.stack([(figure.detach() * weights).sum() for figure in told])
        return (losses * weights).sum(), figures
