"""PPO: a clipped policy loss, a clipped value loss, an entropy bonus, by choice a KL in the loss.

Schulman et al., 2017, equations 7 and 9. Shapes: B rows, S positions.
"""

import torch
from attrs import field, frozen
from torch import Tensor

from ms_align.losses import kl
from ms_align.losses.protocol import Batch, Output
from ms_align.losses.surrogate import clipped, clipped_share, mask_of
from ms_align.settings import number

__all__ = ["PPOLoss", "ValueLoss", "value_loss"]


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """½·max((V - R)², (V' - R)²), where V' is V held within `clip` of the old value.

    Args:
        values: (B, S) float32; takes the gradient.
        old_values: (B, S), when the response was scored.
        returns: (B, S), advantage + old value.
        clip: how far a value may move before it gains nothing; None never clips.

    Returns:
        The loss of each token, and 1 where it was clipped, both (B, S).
    """
    error = (values - returns).square()
    if clip is None:
        return 0.5 * error, torch.zeros_like(error)
    held = old_values + (values - old_values).clamp(-clip, clip)
    held_error = (held - returns).square()
    return 0.5 * torch.maximum(error, held_error), (held_error > error).float()


@frozen(kw_only=True)
class PPOLoss:
    """The policy's loss, and the value's where they share a model.

    Reads of a batch: `targets`, `old_logprobs`, `advantages`; `reference_logprobs` if the KL is in
    the loss; `returns` and `old_values` if the value is shared. All (B, S), target-aligned.
    """

    clip_low: float = field(default=0.2, validator=number())
    clip_high: float = field(default=0.2, validator=number())
    temperature: float = field(default=1.0, validator=number(least=1e-6))
    """At which the responses were drawn."""
    entropy_coeff: float = field(default=0.0, validator=number())
    kl_coeff: float = field(default=0.0, validator=number())
    """Of a KL in the loss; 0 where it is in the reward."""
    kl_estimator: str = "k3_weighted"
    value_coeff: float = field(default=0.0, validator=number())
    """Of the value's loss where policy and value share a model; 0 where they don't."""
    value_clip: float | None = field(default=0.2, validator=number(optional=True))
    value_head: str = "value"

    @property
    def statistics(self) -> tuple[str, ...]:
        """Beside the loss: its parts, and how far the policy has gone from the one that drew."""
        shared = ("value_loss", "value_clip_fraction") if self.value_coeff else ()
        penalty = ("kl_loss",) if self.kl_coeff else ()
        return ("policy_loss", "entropy", "kl_old", "clip_fraction", *penalty, *shared)

    def weight(self, batch: Batch) -> float:
        """Number of response tokens."""
        return float(mask_of(batch).sum())

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum over response tokens, and the figures' sums."""
        mask = mask_of(batch)
        old, advantages = batch["old_logprobs"], batch["advantages"]
        logprobs = -output.token_losses(batch["targets"], temperature=self.temperature)
        difference = torch.where(mask, logprobs - old, 0.0)
        ratios = difference.exp()
        policy = clipped(ratios, advantages, self.clip_low, self.clip_high) * mask
        bonus = self.entropy_coeff > 0
        with torch.set_grad_enabled(bonus and torch.is_grad_enabled()):
            entropy = output.entropies(mask, temperature=self.temperature)
        total = policy.sum()
        if bonus:
            total = total - self.entropy_coeff * entropy.sum()
        with torch.no_grad():
            moved = torch.expm1(difference) - difference  # k3 of the old against the new
            share = clipped_share(ratios, advantages, self.clip_low, self.clip_high) * mask
        told = [policy, entropy, moved, share]
        if self.kl_coeff:
            reference = batch["reference_logprobs"]
            penalty = kl.in_loss(logprobs, reference, old, mask, self.kl_estimator)
            total = total + self.kl_coeff * penalty.sum()
            told.append(penalty)
        if self.value_coeff:
            values = output.head(self.value_head).squeeze(-1)
            errors, held = value_loss(
                values, batch["old_values"], batch["returns"], self.value_clip
            )
            total = total + self.value_coeff * (errors * mask).sum()
            told += [errors * mask, held * mask]
        return total, torch.stack([figure.detach().sum() for figure in told])


@frozen(kw_only=True)
class ValueLoss:
    """The loss of a value model of its own. Reads `targets`, `returns`, `old_values`."""

    clip: float | None = field(default=0.2, validator=number(optional=True))
    head: str = "value"

    @property
    def statistics(self) -> tuple[str, ...]:
        """The share of tokens whose value was clipped."""
        return ("value_clip_fraction",)

    def weight(self, batch: Batch) -> float:
        """Number of response tokens."""
        return float(mask_of(batch).sum())

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum over response tokens, and how many were clipped."""
        mask = mask_of(batch)
        values = output.head(self.head).squeeze(-1)
        errors, held = value_loss(values, batch["old_values"], batch["returns"], self.clip)
        return (errors * mask).sum(), (held * mask).sum().detach()[None]
