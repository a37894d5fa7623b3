"""GRPO: advantages relative to the other responses to the same prompt; no value model."""

from functools import partial
from typing import Literal

from attrs import field, frozen
from torch import Tensor

from ms_align.losses.advantage import group_relative
from ms_align.losses.policy import PolicyLoss
from ms_align.losses.surrogates import LOSS_TYPES, SurrogateOptions, at_level
from ms_align.rollouts.experience import Experience, response_scores, spread_over_tokens
from ms_align.settings import integer, one_of
from ms_align.trainers.frame.online import OnlineTrainer


@frozen(kw_only=True, slots=False)
class GRPOTrainer(SurrogateOptions, OnlineTrainer):
    """Optimize a reward with GRPO, or with another loss of its family (`loss_type`).

    Raises:
        ConfigError: a setting has the wrong type or is out of range.
    """

    algorithm = "grpo"
    learns_from_groups = True

    num_generations: int = field(default=8, validator=integer(minimum=2))
    """Responses per prompt, at least 2."""
    kl_in: Literal["reward", "loss"] = field(default="loss", validator=one_of("reward", "loss"))
    kl_estimator: str = "k3_weighted"
    scale_rewards: Literal["group", "batch", "mean", "none"] = field(
        default="group", validator=one_of("group", "batch", "mean", "none")
    )
    """Divide centered rewards by the `group`'s or `batch`'s standard deviation, by the group's
    `mean` (MaxRL), or `none`."""

    def loss(self, kl_coeff: float) -> PolicyLoss:
        """Build the loss of `loss_type`."""
        function, aggregation = LOSS_TYPES[self.loss_type]
        return PolicyLoss(
            **self.surrogate(kl_coeff),
            aggregation=aggregation,
            longest=self.max_new_tokens,
            ratio=partial(at_level, level=self.importance_sampling_level),
            function=function,
            options=self.subset(SurrogateOptions),
        )

    def advantages(self, experience: Experience, kl_coeff: float) -> dict[str, Tensor]:
        """Compute one advantage per response, repeated at its tokens, (N, S)."""
        scores = response_scores(experience, kl_coeff, self.kl_estimator)  # (N,)
        advantages = group_relative(scores, self.num_generations, scale=self.scale_rewards)
        return {"advantages": spread_over_tokens(advantages, experience)}
