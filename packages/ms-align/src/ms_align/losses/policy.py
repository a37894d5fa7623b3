"""The clipped surrogate loss that PPO, GRPO, RLOO and their kin are values of.

Schulman et al., 2017, equation 7, in what each algorithm makes of it:
1. PPO: a ratio a token, a mean over tokens.
2. GRPO (Shao et al., 2024, equation 3): a ratio a token; `aggregation="token"` with an upper clip
   of its own is DAPO's (Yu et al., 2025), `"constant"` is that of Liu et al., 2025.
3. RLOO (Ahmadian et al., 2024): one ratio a response, a mean over responses. In the first update
   its gradient is that of -A·log π.
Shapes: B rows, S positions; a mask is true where a target is the response's own token.
"""

from collections.abc import Callable
from typing import Literal

import torch
from attrs import field, frozen
from torch import Tensor

from ms_align.errors import ConfigError
from ms_align.losses import kl
from ms_align.losses.protocol import IGNORED, Batch, Output
from ms_align.settings import number, one_of, whole

Aggregation = Literal["token", "sequence", "constant"]


def per_token(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """Return a ratio for each token: the log-ratios (B, S) as they are."""
    return log_ratios


def per_response(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """Sum a response's log-ratios into one ratio, which each of its tokens gets (B, S)."""
    return log_ratios.sum(1, keepdim=True).expand_as(log_ratios)


@frozen(kw_only=True)
class PolicyLoss:
    """The policy's loss. Reads `targets`, `old_logprobs`, `advantages`, (B, S), target-aligned.

    `reference_logprobs` too, if `kl_coeff` is not 0.
    """

    clip_low: float = field(default=0.2, validator=number())
    clip_high: float = field(default=0.2, validator=number())
    temperature: float = field(default=1.0, validator=number(least=1e-6))
    """Temperature at which the responses were drawn."""
    entropy_coeff: float = field(default=0.0, validator=number())
    kl_coeff: float = field(default=0.0, validator=number())
    """Coefficient of a KL in the loss; 0 where it is in the reward."""
    kl_estimator: str = "k3_weighted"
    aggregation: Aggregation = field(
        default="token", validator=one_of("token", "sequence", "constant")
    )
    longest: int | None = field(default=None, validator=whole(optional=True))
    """Tokens of the longest response, for `constant`."""
    ratio: Callable[[Tensor, Tensor], Tensor] = per_token
    """What a ratio is of: makes log-ratios (B, S) from those of tokens, under a mask (B, S)."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """Entropy, how far the policy has moved from the one that drew, how much is clipped."""
        penalty = ("kl_loss",) if self.kl_coeff else ()
        return ("entropy", "kl_old", "clip_fraction", *penalty)

    def weight(self, batch: Batch) -> float:
        """Count tokens or responses, as `aggregation` says."""
        return divisor(mask_of(batch), self.aggregation, self.longest)

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the weighted sum over response tokens, and the statistics' sums."""
        mask = mask_of(batch)
        weights = token_weights(mask, self.aggregation)
        losses, terms = self.terms(output, batch, mask)
        sums = [(terms[name].detach() * weights).sum() for name in self.statistics]
        return (losses * weights).sum(), torch.stack(sums)

    def terms(self, output: Output, batch: Batch, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of each token, and each statistic by name, all (B, S)."""
        old, advantages = batch["old_logprobs"], batch["advantages"]
        logprobs = -output.token_losses(batch["targets"], temperature=self.temperature)
        difference = torch.where(mask, logprobs - old, 0.0)
        ratios = self.ratio(difference, mask).exp()
        losses = policy = clipped(ratios, advantages, self.clip_low, self.clip_high)
        bonus = self.entropy_coeff > 0
        with torch.set_grad_enabled(bonus and torch.is_grad_enabled()):
            entropy = output.entropies(mask, temperature=self.temperature)
        if bonus:
            losses = losses - self.entropy_coeff * entropy
        with torch.no_grad():
            # k3 of the policy that drew against this one.
            moved = self.ratio(torch.expm1(difference) - difference, mask)
            share = clipped_share(ratios, advantages, self.clip_low, self.clip_high)
        terms = {"policy_loss": policy, "entropy": entropy, "kl_old": moved, "clip_fraction": share}
        if self.kl_coeff:
            reference = batch["reference_logprobs"]
            terms["kl_loss"] = kl.in_loss(logprobs, reference, old, mask, self.kl_estimator)
            losses = losses + self.kl_coeff * terms["kl_loss"]
        return losses, terms


def mask_of(batch: Batch) -> Tensor:
    """Find which targets count, (B, S) bool."""
    return batch["targets"] != IGNORED


def clipped(ratios: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Compute -min(r·A, clip(r, 1 - low, 1 + high)·A).

    Args:
        ratios: π/μ, any shape; takes the gradient.
        advantages: of the same shape.
        low: how far below 1 a ratio still counts.
        high: how far above.
    """
    return torch.maximum(-ratios * advantages, -ratios.clamp(1 - low, 1 + high) * advantages)


def clipped_share(ratios: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Mark with 1 where the clip takes the gradient away, 0 elsewhere; shaped as `ratios`."""
    above = (ratios > 1 + high) & (advantages > 0)
    below = (ratios < 1 - low) & (advantages < 0)
    return (above | below).float()


def token_weights(mask: Tensor, aggregation: str) -> Tensor:
    """Compute how much each token counts, (B, S) float32.

    `token` counts each alike; `sequence` each response alike, its tokens sharing; `constant` each
    token alike, but divided by a fixed length, so that no response's length changes its weight.
    """
    weights = mask.float()
    if aggregation == "sequence":
        return weights / weights.sum(1, keepdim=True).clamp(min=1)
    return weights


def divisor(mask: Tensor, aggregation: str, longest: int | None) -> float:
    """Compute what the sum of `token_weights` times losses is divided by.

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
