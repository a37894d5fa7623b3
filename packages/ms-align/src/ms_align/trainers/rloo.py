"""RLOO: sequence-level REINFORCE with a leave-one-out baseline per prompt."""

from attrs import field, frozen
from torch import Tensor

from ms_align.losses.advantage import best_of_k, has_baseline, leave_one_out, whiten
from ms_align.losses.policy import PolicyLoss, per_response
from ms_align.rollouts.experience import Experience, response_scores, spread_over_tokens
from ms_align.rollouts.options import GroupOptions
from ms_align.settings import flag, integer, number
from ms_align.trainers.base.online import OnlineTrainer


@frozen(kw_only=True, slots=False)
class RLOOTrainer(GroupOptions, OnlineTrainer):
    """Optimize a reward with RLOO.

    REINFORCE with a leave-one-out baseline; the KL penalty is in the reward, where it is exact.

    Raises:
        ConfigError: a setting has the wrong type or is out of range.
    """

    algorithm = "rloo"

    num_generations: int = field(default=4, validator=integer(minimum=2))
    """Responses per prompt, at least 2."""
    kl_coeff: float = field(default=0.05, validator=number())
    whiten_advantages: bool = field(default=False, validator=flag)
    """Normalize the advantages of a rollout to mean 0 and standard deviation 1."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.check_group_size(self.num_generations)

    @property
    def learns_from_groups(self) -> bool:
        """True, as the baseline is the mean of the group's other responses."""
        return True

    def loss(self, kl_coeff: float) -> PolicyLoss:
        """Build the clipped surrogate loss with one ratio per response."""
        return PolicyLoss(**self.surrogate(kl_coeff), aggregation="sequence", ratio=per_response)

    def advantages(self, experience: Experience, kl_coeff: float) -> dict[str, Tensor]:
        """Compute one advantage per response, repeated at its tokens, (N, S)."""
        scores = response_scores(experience, kl_coeff, self.kl_estimator)  # (N,)
        if self.pass_at_k > 1:
            scores = best_of_k(scores, self.num_generations, self.pass_at_k)
        advantages = leave_one_out(scores, self.num_generations)
        if self.whiten_advantages:
            # Responses without a baseline have no advantage and are left out of the statistics.
            advantages = whiten(advantages[None], has_baseline(scores, self.num_generations)[None])[
                0
            ]
        return {"advantages": spread_over_tokens(advantages, experience)}
