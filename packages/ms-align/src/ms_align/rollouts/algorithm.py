"""What differs between PPO, GRPO, RLOO and their kin: losses and advantages."""

from typing import Protocol

from torch import Tensor

from ms_align.losses.protocol import Loss
from ms_align.rollouts.experience import Experience


class Algorithm(Protocol):
    """A value that is handed to `RolloutLearner`; each trainer of `ms_align.trainers` is one."""

    def loss(self, kl_coeff: float) -> Loss:
        """Build the policy's loss; the coefficient is 0 where the KL is not in the loss."""

    def advantages(self, experience: Experience, kl_coeff: float) -> dict[str, Tensor]:
        """Compute what the loss reads beside the tokens, (N, S) each, from a scored rollout.

        The coefficient is 0 where the KL is not in the reward.
        """

    def value_loss(self) -> Loss | None:
        """Build the loss of a value model of its own, if there is one."""

    @property
    def learns_from_groups(self) -> bool:
        """Whether equal rewards in each group teach nothing."""
