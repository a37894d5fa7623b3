"""GRPO: a group of responses to each prompt, each judged against its group; no value model."""

from typing import Literal

from attrs import field, frozen
from torch import Tensor

from ms_align.errors import ConfigError
from ms_align.losses.advantage import group_relative
from ms_align.losses.grpo import GRPOLoss
from ms_align.losses.protocol import Loss
from ms_align.losses.surrogate import Aggregation
from ms_align.rollouts.experience import Experience
from ms_align.rollouts.groups import spread_over_tokens, with_divergence
from ms_align.settings import one_of, whole
from ms_align.trainers.frame.online import OnlineTrainer

__all__ = ["GRPOTrainer"]


@frozen(kw_only=True, slots=False)
class GRPOTrainer(OnlineTrainer):
    """Group-relative policy optimisation.

    Raises:
        ConfigError: a setting is of the wrong kind or out of range.
    """

    algorithm = "grpo"

    group_size: int = field(default=8, validator=whole(least=2))
    """Responses to each prompt, at least 2."""
    kl_in: Literal["reward", "loss"] = field(default="loss", validator=one_of("reward", "loss"))
    kl_estimator: str = "k3_weighted"
    scale_rewards: Literal["group", "batch", "none"] = field(
        default="group", validator=one_of("group", "batch", "none")
    )
    """What a reward's distance from its group's mean is divided by."""
    aggregation: Aggregation = field(
        default="token", validator=one_of("token", "sequence", "constant")
    )
    """What counts alike in the loss; `constant` divides by max_new_tokens."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.group_size < 2:
            raise ConfigError(f"group_size is {self.group_size}; give at least 2")

    @property
    def learns_from_groups(self) -> bool:
        """Equal rewards in each group teach nothing."""
        return True

    def loss(self, kl_coeff: float) -> Loss:
        """The clipped surrogate."""
        return GRPOLoss(
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            temperature=self.sampling.policy_temperature,
            entropy_coeff=self.entropy_coeff,
            kl_coeff=kl_coeff if self.kl_in == "loss" else 0.0,
            kl_estimator=self.kl_estimator if self.kl_in == "loss" else "k3_weighted",
            aggregation=self.aggregation,
            longest=self.max_new_tokens,
        )

    def advantages(self, experience: Experience, kl_coeff: float) -> dict[str, Tensor]:
        """One advantage a response, at each of its tokens, (N, S)."""
        coefficient = kl_coeff if self.kl_in == "reward" else 0.0
        scores = with_divergence(experience, coefficient, self.kl_estimator)
        found = group_relative(scores, self.group_size, scale=self.scale_rewards)
        return {"advantages": spread_over_tokens(found, experience)}
