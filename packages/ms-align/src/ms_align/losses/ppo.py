"""PPO's losses: the clipped policy loss, with the value's beside it where they share a model.

Schulman et al., 2017, equations 7 and 9. Shapes: B rows, S positions.
"""

import torch
from attrs import field, frozen
from torch import Tensor

from ms_align.losses.policy import PolicyLoss, mask_of
from ms_align.losses.protocol import Batch, Output
from ms_align.settings import number

VALUE_HEAD = "value"


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Compute ½·max((V - R)², (V' - R)²), where V' is V held within `clip` of the old value.

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


def _of_batch(output: Output, batch: Batch, clip: float | None) -> tuple[Tensor, Tensor]:
    values = output.head(VALUE_HEAD).squeeze(-1)
    return value_loss(values, batch["old_values"], batch["returns"], clip)


@frozen(kw_only=True)
class PPOLoss(PolicyLoss):
    """The policy's loss, and the value's where they share a model.

    Reads `returns` and `old_values` (B, S) too, if the value is shared.
    """

    value_coeff: float = field(default=0.0, validator=number())
    """Weight of the value's loss where policy and value share a model; 0 where they don't."""
    value_clip: float | None = field(default=0.2, validator=number(optional=True))

    @property
    def statistics(self) -> tuple[str, ...]:
        """The policy's, with its part of the loss first; and the value's, where it is shared."""
        shared = ("value_loss", "value_clip_fraction") if self.value_coeff else ()
        return ("policy_loss", *super().statistics, *shared)

    def terms(self, output: Output, batch: Batch, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of each token, and each statistic by name, all (B, S)."""
        losses, terms = super().terms(output, batch, mask)
        if self.value_coeff:
            errors, held = _of_batch(output, batch, self.value_clip)
            losses = losses + self.value_coeff * errors
            terms |= {"value_loss": errors, "value_clip_fraction": held}
        return losses, terms


@frozen(kw_only=True)
class ValueLoss:
    """The loss of a value model of its own. Reads `targets`, `returns`, `old_values`."""

    clip: float | None = field(default=0.2, validator=number(optional=True))

    statistics = ("value_clip_fraction",)
    """The share of tokens whose value was clipped."""

    def weight(self, batch: Batch) -> float:
        """Count the response tokens."""
        return float(mask_of(batch).sum())

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum the losses over response tokens, and count how many were clipped."""
        mask = mask_of(batch)
        errors, held = _of_batch(output, batch, self.clip)
        return (errors * mask).sum(), (held * mask).sum().detach()[None]
