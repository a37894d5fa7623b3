"""GRPO: advantages relative to the other responses to the same prompt; no value model."""

from functools import partial
from typing import Any, ClassVar, Literal

from attrs import Attribute, field, frozen
from torch import Tensor

from ms_align.errors import ConfigError
from ms_align.losses.advantage import best_of_k, group_relative, returns_to_go, whiten
from ms_align.losses.policy import PolicyLoss
from ms_align.losses.surrogates import LOSS_TYPES, SurrogateOptions, at_level
from ms_align.rollouts.experience import (
    Experience,
    response_scores,
    spread_over_tokens,
    token_rewards,
)
from ms_align.rollouts.options import GroupOptions
from ms_align.settings import integer, one_of
from ms_align.trainers.base.online import OnlineTrainer
from ms_align.used_settings import UsedIf


def _check_generations(instance: Any, attribute: "Attribute[Any]", value: object) -> None:
    """Require at least two responses per prompt where they are compared with one another."""
    integer(minimum=1 if instance.advantage_estimator == "reinforce_plus_plus" else 2)(
        instance, attribute, value
    )


@frozen(kw_only=True, slots=False)
class GRPOTrainer(SurrogateOptions, GroupOptions, OnlineTrainer):
    """Optimize a reward with GRPO, or with another loss of its family (`loss_type`).

    Raises:
        ConfigError: a setting has the wrong type or is out of range.
    """

    algorithm = "grpo"

    num_generations: int = field(default=8, validator=_check_generations)
    """Responses per prompt, at least 2; at least 1 for `reinforce_plus_plus`."""
    kl_in: Literal["reward", "loss"] = field(default="loss", validator=one_of("reward", "loss"))
    kl_estimator: str = "k3_weighted"
    advantage_estimator: Literal["grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = (
        field(
            default="grpo",
            validator=one_of("grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
        )
    )
    """Advantage: `grpo`, relative to the group; `reinforce_plus_plus`, each token's return,
    normalized over the tokens of the rollout; `reinforce_plus_plus_baseline`, the reward minus the
    group's mean, normalized likewise."""
    scale_rewards: Literal["group", "batch", "mean", "none"] = field(
        default="group", validator=one_of("group", "batch", "mean", "none")
    )
    """With `grpo`: divide centered rewards by the `group`'s or `batch`'s standard deviation, by the
    group's `mean` (MaxRL), or `none`."""

    used_if: ClassVar[tuple[UsedIf, ...]] = (
        UsedIf(
            "scale_rewards",
            "with advantage_estimator='grpo'",
            lambda run: run.advantage_estimator == "grpo",
        ),
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.check_group_size(self.num_generations)
        if not self.learns_from_groups and (self.max_resample_times or self.pass_at_k > 1):
            raise ConfigError(
                "max_resample_times and pass_at_k compare the responses of a group, and "
                "advantage_estimator = 'reinforce_plus_plus' does not; change "
                "advantage_estimator or remove them"
            )

    @property
    def learns_from_groups(self) -> bool:
        """True if advantages are relative to the group, so equal rewards in it teach nothing."""
        return self.advantage_estimator != "reinforce_plus_plus"

    def loss(self, kl_coeff: float) -> PolicyLoss:
        """Build the loss of `loss_type`."""
        function, aggregation = LOSS_TYPES[self.loss_type]
        return PolicyLoss(
            **self.surrogate(kl_coeff),
            aggregation=aggregation,
            max_response_tokens=self.max_response_tokens,
            ratio=partial(at_level, level=self.importance_sampling_level),
            function=function,
            options=self.subset(SurrogateOptions),
        )

    def advantages(self, experience: Experience, kl_coeff: float) -> dict[str, Tensor]:
        """Compute the advantage of each response token, (N, S)."""
        if self.advantage_estimator == "reinforce_plus_plus":
            # Hu, 2025, equations 5 and 6, without discount.
            rewards = token_rewards(experience, kl_coeff, self.kl_estimator)
            returns = returns_to_go(rewards, experience.mask)
            return {"advantages": whiten(returns, experience.mask)}
        scores = response_scores(experience, kl_coeff, self.kl_estimator)  # (N,)
        if self.pass_at_k > 1:
            scores = best_of_k(scores, self.num_generations, self.pass_at_k)
        if self.advantage_estimator == "reinforce_plus_plus_baseline":
            centered = group_relative(scores, self.num_generations, scale="none")
            spread = spread_over_tokens(centered, experience)
            return {"advantages": whiten(spread, experience.mask)}
        advantages = group_relative(scores, self.num_generations, scale=self.scale_rewards)
        return {"advantages": spread_over_tokens(advantages, experience)}
