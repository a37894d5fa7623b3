"""Protocol of a policy-gradient algorithm: its losses and advantages."""

from typing import Protocol

from torch import Tensor

from ms_align.losses.protocol import Loss
from ms_align.rollouts.experience import Experience


class Algorithm(Protocol):
    """Losses and advantages of an algorithm; implemented by the online trainers."""

    def loss(self, kl_coeff: float) -> Loss:
        """Build the policy loss; `kl_coeff` is 0 unless the KL penalty is in the loss."""

    def advantages(self, experience: Experience, kl_coeff: float) -> dict[str, Tensor]:
        """Compute the columns that the loss reads, (N, S) each, from a scored rollout.

        `kl_coeff` is 0 unless the KL penalty is in the reward.
        """

    def value_loss(self) -> Loss | None:
        """Build the loss of a separate value model, if the algorithm has one."""

    @property
    def learns_from_groups(self) -> bool:
        """True if advantages are relative to the group, so equal rewards in it teach nothing."""

    @property
    def max_resample_times(self) -> int:
        """Maximum number of batches of prompts that replace groups with equal rewards."""
