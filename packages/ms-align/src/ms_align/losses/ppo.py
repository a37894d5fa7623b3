"""PPO losses: the clipped policy loss, and the value loss in the same or a separate model.

Schulman et al., 2017, equations 7 and 9. Shapes: B rows, S positions.
"""

import torch
from attrs import field, frozen
from torch import Tensor

from ms_align.losses.policy import PolicyLoss, target_mask
from ms_align.losses.protocol import Batch, Output
from ms_align.settings import number

VALUE_HEAD = "value"


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Compute ½·max((V - R)², (V' - R)²), with V' the new value clipped around the old one.

    Args:
        values: (B, S) float32; receives the gradient.
        old_values: (B, S), from the rollout.
        returns: (B, S), advantage + old value.
        clip: maximum change of a value; None: no clipping.

    Returns:
        Loss of each token, and 1 where it was clipped, both (B, S).
    """
    error = (values - returns).square()
    if clip is None:
        return 0.5 * error, torch.zeros_like(error)
    # As in the policy loss, the larger of clipped and unclipped error counts.
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    clipped_error = (clipped - returns).square()
    return 0.5 * torch.maximum(error, clipped_error), (clipped_error > error).float()


def _value_loss_of_batch(output: Output, batch: Batch, clip: float | None) -> tuple[Tensor, Tensor]:
    values = output.head(VALUE_HEAD).squeeze(-1)  # (B, S)
    return value_loss(values, batch["old_values"], batch["returns"], clip)


@frozen(kw_only=True)
class PPOLoss(PolicyLoss):
    """Policy loss, plus the value loss if both share a model.

    With a shared value head it also reads `returns` and `old_values` (B, S).
    """

    value_coeff: float = field(default=0.0, validator=number())
    """Weight of the value loss if policy and value share a model; else 0."""
    value_clip: float | None = field(default=0.2, validator=number(optional=True))

    @property
    def statistics(self) -> tuple[str, ...]:
        """Statistics of the policy loss and, with a shared value head, of the value loss."""
        shared = ("value_loss", "value_clip_fraction") if self.value_coeff else ()
        return ("policy_loss", *super().statistics, *shared)

    def terms(self, output: Output, batch: Batch, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each token and the statistics by name, all (B, S)."""
        losses, terms = super().terms(output, batch, mask)
        if self.value_coeff:
            value_losses, is_clipped = _value_loss_of_batch(output, batch, self.value_clip)
            losses = losses + self.value_coeff * value_losses
            terms |= {"value_loss": value_losses, "value_clip_fraction": is_clipped}
        return losses, terms


@frozen(kw_only=True)
class ValueLoss:
    """Loss of a separate value model. Reads `targets`, `returns` and `old_values`, all (B, S)."""

    clip: float | None = field(default=0.2, validator=number(optional=True))

    statistics = ("value_clip_fraction",)
    """Fraction of tokens whose value was clipped."""

    def weight(self, batch: Batch) -> float:
        """Return the number of response tokens."""
        return float(target_mask(batch).sum())

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum over response tokens and the number of clipped values."""
        mask = target_mask(batch)
        losses, is_clipped = _value_loss_of_batch(output, batch, self.clip)
        return (losses * mask).sum(), (is_clipped * mask).sum().detach()[None]
