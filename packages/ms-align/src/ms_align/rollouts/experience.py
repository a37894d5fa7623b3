"""A scored rollout: responses, what they are worth, and how far they are from the reference.

Shapes: N responses, S positions, everything aligned with targets.
"""

from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from ms_align.generation.responses import Responses
from ms_align.losses import kl
from ms_align.losses.protocol import IGNORED
from ms_align.rewards.scoring import Failure, Reward, Sample, Scores
from ms_align.rollouts.prompts import Prompt
from ms_align.rollouts.rows import samples_of, score_together
from ms_align.tokenizer import Tokenizer


@frozen(kw_only=True)
class Scoring:
    """How responses are judged."""

    rewards: Mapping[str, tuple[Reward, float]]
    tokenizer: Tokenizer | None
    on_failure: Failure
    penalty: float

    def __call__(
        self, prompts: Sequence[Prompt], responses: Responses
    ) -> tuple[Scores, list[Sample]]:
        """Score all responses; return the scores, and the samples that were judged."""
        samples = samples_of(prompts, responses, self.tokenizer)
        scores = score_together(
            self.rewards, samples, on_failure=self.on_failure, penalty=self.penalty
        )
        return scores, samples


@frozen(kw_only=True)
class Experience:
    """What advantages are made from."""

    targets: Tensor
    """(N, S) int64; -100 but at response tokens, and throughout a row that is left out."""
    old_logprobs: Tensor
    """(N, S) float32."""
    reference_logprobs: Tensor | None
    values: Tensor | None
    """(N, S) float32, before each response token."""
    scores: Tensor
    """(N,) float32, after penalties; NaN where a row is left out."""

    @property
    def mask(self) -> Tensor:
        """(N, S) bool: response tokens that count."""
        return self.targets != IGNORED

    @property
    def kept(self) -> Tensor:
        """(N,) bool: rows that are not left out."""
        return self.scores.isfinite()

    def divergence(self, estimator: str = "k1") -> Tensor:
        """Estimate the KL from the reference, (N, S), 0 where nothing counts."""
        if self.reference_logprobs is None:
            return torch.zeros_like(self.old_logprobs)
        return kl.estimate(self.old_logprobs, self.reference_logprobs, estimator) * self.mask


def shaped_scores(
    scores: Tensor,
    responses: Responses,
    *,
    missing_stop_penalty: float,
    length_penalty: float,
    clip: float | None,
) -> Tensor:
    """Clip scores (N,), then take off what a missing stop and each token cost."""
    shaped = scores if clip is None else scores.clamp(-clip, clip)
    shaped = shaped - missing_stop_penalty * (~responses.stopped).float()
    return shaped - length_penalty * responses.lengths.float()


def token_rewards(experience: Experience, kl_coeff: float, estimator: str) -> Tensor:
    """Compute rewards (N, S): -β·KL at each response token, and the score at the last one."""
    mask = experience.mask
    rewards = -kl_coeff * experience.divergence(estimator)
    positions = torch.arange(mask.shape[1])
    last = torch.where(mask, positions, -1).amax(1)
    rows = (last >= 0).nonzero()[:, 0]
    rewards[rows, last[rows]] += experience.scores[rows]
    return rewards


def response_scores(experience: Experience, kl_coeff: float, estimator: str) -> Tensor:
    """Compute scores less β times each response's KL, (N,); NaN where a response is left out."""
    scores = experience.scores.masked_fill(~experience.kept, torch.nan)
    if kl_coeff:
        scores = scores - kl_coeff * experience.divergence(estimator).sum(1)
    return scores


def spread_over_tokens(advantages: Tensor, experience: Experience) -> Tensor:
    """Spread each response's advantage over its tokens, (N, S) float32, 0 elsewhere."""
    return advantages[:, None].float() * experience.mask
