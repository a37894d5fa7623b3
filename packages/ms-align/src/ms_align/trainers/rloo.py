"""RLOO: REINFORCE on whole responses, with the others of the group as baseline."""

from attrs import field, frozen
from torch import Tensor

from ms_align.losses.advantage import compared, leave_one_out, whiten
from ms_align.losses.policy import PolicyLoss, per_response
from ms_align.rollouts.experience import Experience, response_scores, spread_over_tokens
from ms_align.settings import flag, number, whole
from ms_align.trainers.frame.online import OnlineTrainer


@frozen(kw_only=True, slots=False)
class RLOOTrainer(OnlineTrainer):
    """Optimise a reward by RLOO.

    REINFORCE with a leave-one-out baseline; the KL stands in the reward, where it is exact.

    Raises:
        ConfigError: a setting is of the wrong kind or out of range.
    """

    algorithm = "rloo"
    learns_from_groups = True

    group_size: int = field(default=4, validator=whole(least=2))
    """Responses to each prompt, at least 2."""
    kl_coeff: float = field(default=0.05, validator=number())
    whiten_advantages: bool = field(default=False, validator=flag)
    """Give the advantages of a rollout a mean of 0 and a deviation of 1."""

    def loss(self, kl_coeff: float) -> PolicyLoss:
        """Build the clipped surrogate, one ratio a response."""
        return PolicyLoss(**self.surrogate(kl_coeff), aggregation="sequence", ratio=per_response)

    def advantages(self, experience: Experience, kl_coeff: float) -> dict[str, Tensor]:
        """Compute one advantage a response, at each of its tokens, (N, S)."""
        scores = response_scores(experience, kl_coeff, self.kl_estimator)
        found = leave_one_out(scores, self.group_size)
        if self.whiten_advantages:
            found = whiten(found[None], compared(scores, self.group_size)[None])[0]
        return {"advantages": spread_over_tokens(found, experience)}
