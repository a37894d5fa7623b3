"""GRPO: a group of responses to each prompt, each judged against its group; no value model."""

from typing import Literal

from attrs import field, frozen
from torch import Tensor

from ms_align.losses.advantage import group_relative
from ms_align.losses.policy import Aggregation, PolicyLoss
from ms_align.rollouts.experience import Experience, response_scores, spread_over_tokens
from ms_align.settings import one_of, whole
from ms_align.trainers.frame.online import OnlineTrainer


@frozen(kw_only=True, slots=False)
class GRPOTrainer(OnlineTrainer):
    """Optimise a reward by GRPO.

    Raises:
        ConfigError: a setting is of the wrong kind or out of range.
    """

    algorithm = "grpo"
    learns_from_groups = True

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

    def loss(self, kl_coeff: float) -> PolicyLoss:
        """Build the clipped surrogate, a ratio a token."""
        return PolicyLoss(
            **self.surrogate(kl_coeff), aggregation=self.aggregation, longest=self.max_new_tokens
        )

    def advantages(self, experience: Experience, kl_coeff: float) -> dict[str, Tensor]:
        """Compute one advantage a response, at each of its tokens, (N, S)."""
        scores = response_scores(experience, kl_coeff, self.kl_estimator)
        found = group_relative(scores, self.group_size, scale=self.scale_rewards)
        return {"advantages": spread_over_tokens(found, experience)}
