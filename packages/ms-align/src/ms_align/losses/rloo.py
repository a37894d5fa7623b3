"""RLOO: REINFORCE on whole responses with the others of the group as baseline.

Ahmadian et al., 2024. The loss of a response is -r·A with r = π(response)/μ(response), whose
gradient in the first update is that of -A·log π; later updates may clip r as PPO does. A KL
belongs in the reward, where it is exact. Shapes: B rows, S positions.
"""

import torch
from attrs import field, frozen
from torch import Tensor

from ms_align.losses.protocol import Batch, Output
from ms_align.losses.surrogate import clipped, clipped_share, mask_of
from ms_align.settings import number

__all__ = ["RLOOLoss"]


@frozen(kw_only=True)
class RLOOLoss:
    """The policy's loss. Reads `targets`, `old_logprobs`, `advantages`, (B, S), target-aligned.

    A response's advantage stands at each of its tokens.
    """

    clip_low: float = field(default=0.2, validator=number())
    clip_high: float = field(default=0.2, validator=number())
    temperature: float = field(default=1.0, validator=number(least=1e-6))
    entropy_coeff: float = field(default=0.0, validator=number())

    @property
    def statistics(self) -> tuple[str, ...]:
        """A response's mean entropy, how far the policy has gone, the share that was clipped."""
        return ("entropy", "kl_old", "clip_fraction")

    def weight(self, batch: Batch) -> float:
        """Number of responses that have a token."""
        return float(mask_of(batch).any(1).sum())

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum over responses, and the figures' sums."""
        mask = mask_of(batch)
        lengths = mask.sum(1).clamp(min=1)
        advantages = (batch["advantages"] * mask).sum(1) / lengths
        logprobs = -output.token_losses(batch["targets"], temperature=self.temperature)
        difference = torch.where(mask, logprobs - batch["old_logprobs"], 0.0)
        ratios = difference.sum(1).exp()
        losses = clipped(ratios, advantages, self.clip_low, self.clip_high)
        bonus = self.entropy_coeff > 0
        with torch.set_grad_enabled(bonus and torch.is_grad_enabled()):
            entropy = output.entropies(mask, temperature=self.temperature).sum(1) / lengths
        if bonus:
            losses = losses - self.entropy_coeff * entropy
        with torch.no_grad():
            moved = (torch.expm1(difference) - difference).sum(1)
            share = clipped_share(ratios, advantages, self.clip_low, self.clip_high)
        told = [entropy, moved, share]
        return losses.sum(), torch.stack([figure.detach().sum() for figure in told])
