"""Protocols of the learner's parts: the algorithm and the episode generator."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ms_align.generation.responses import Responses, RolloutEngine
from ms_align.generation.sampling import Sampling
from ms_align.losses.protocol import Loss
from ms_align.rollouts.experience import Experience
from ms_align.rollouts.prompts import Prompt


class EpisodeGenerator(Protocol):
    """Generator of multi-turn episodes, with tools or an environment."""

    def __call__(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        count: int,
        seed: int,
    ) -> Responses:
        """Generate `count` episodes per prompt, for the prompts of all data ranks. Collective."""

    def close(self) -> None:
        """Release processes."""


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
