"""Scored rollouts: responses with their rewards and their KL from the reference.

Shapes: N responses, S positions; all columns are aligned with targets.
"""

from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from ms_align.generation.responses import Responses
from ms_align.losses import kl
from ms_align.losses.protocol import IGNORED
from ms_align.rewards.scoring import BatchRewards, Failure, Reward, Sample
from ms_align.rollouts.prompts import Prompt
from ms_align.rollouts.rows import samples_of, score_on_rank_zero
from ms_align.tokenizer import Tokenizer


@frozen(kw_only=True)
class RewardScorer:
    """Reward functions and the handling of their failures."""

    rewards: Mapping[str, tuple[Reward, float]]
    tokenizer: Tokenizer | None
    on_failure: Failure
    penalty: float

    def __call__(
        self, prompts: Sequence[Prompt], responses: Responses
    ) -> tuple[BatchRewards, list[Sample]]:
        """Score all responses; return the scores and the samples passed to the rewards."""
        samples = samples_of(prompts, responses, self.tokenizer)
        failures = {
            row: f"episode {row}: {episode.failure}"
            for row, episode in enumerate(responses.episodes or ())
            if episode.failure
        }
        valid = [row for row in range(len(samples)) if row not in failures]
        if valid:
            scores = score_on_rank_zero(
                self.rewards,
                [samples[row] for row in valid],
                on_failure=self.on_failure,
                penalty=self.penalty,
            )
        else:
            none = torch.zeros(0)
            parts = dict.fromkeys(self.rewards, none)
            scores = BatchRewards(total=none, parts=parts, failures=())
        if not failures:
            return scores, samples

        def spread(values: Tensor) -> Tensor:  # failed episodes have no score and stay NaN
            result = torch.full((len(samples),), torch.nan)
            result[valid] = values
            return result

        parts = {name: spread(part) for name, part in scores.parts.items()}
        messages = (*scores.failures, *failures.values())
        return BatchRewards(total=spread(scores.total), parts=parts, failures=messages), samples


@frozen(kw_only=True)
class Experience:
    """Input of the advantage estimators."""

    targets: Tensor
    """(N, S) int64; -100 except at response tokens, and -100 throughout skipped rows."""
    old_logprobs: Tensor
    """(N, S) float32, log-probabilities of the policy that generated the responses."""
    reference_logprobs: Tensor | None
    values: Tensor | None
    """(N, S) float32, value estimate before each response token."""
    scores: Tensor
    """(N,) float32, after penalties; NaN for skipped rows."""

    @property
    def mask(self) -> Tensor:
        """(N, S) bool: response tokens of rows that are not skipped."""
        return self.targets != IGNORED

    @property
    def valid(self) -> Tensor:
        """(N,) bool: rows that are not skipped."""
        return self.scores.isfinite()

    def divergence(self, estimator: str = "k1") -> Tensor:
        """Estimate the KL from the reference per token, (N, S), 0 outside the mask."""
        if self.reference_logprobs is None:
            return torch.zeros_like(self.old_logprobs)
        return kl.estimate(self.old_logprobs, self.reference_logprobs, estimator) * self.mask


def shaped_scores(
    scores: Tensor,
    responses: Responses,
    *,
    missing_eos_penalty: float,
    length_penalty: float,
    overlong: tuple[int, int | None] = (0, None),
    clip: float | None,
) -> Tensor:
    """Clip scores (N,), then subtract the penalties for a missing stop and for length.

    Args:
        scores: (N,).
        responses: N responses.
        missing_eos_penalty: for a response that was cut.
        length_penalty: per token.
        overlong: maximum length and the tokens before it over which a penalty grows from 0 to 1
            (Yu et al., 2025, "DAPO", equation 13); None for no such penalty.
        clip: limit of the scores' absolute value.
    """
    shaped = scores if clip is None else scores.clamp(-clip, clip)
    shaped = shaped - missing_eos_penalty * (~responses.stopped).float()
    lengths = responses.sampled_lengths.float()
    longest, cache = overlong
    if cache is not None:
        shaped = shaped - ((lengths - (longest - cache)) / cache).clamp(0, 1)
    return shaped - length_penalty * lengths


def token_rewards(experience: Experience, kl_coeff: float, estimator: str) -> Tensor:
    """Compute rewards (N, S): -β·KL at each response token, plus the score at the last one."""
    mask = experience.mask
    rewards = -kl_coeff * experience.divergence(estimator)
    positions = torch.arange(mask.shape[1])
    # Index of each row's last response token; -1 for skipped rows.
    last = torch.where(mask, positions, -1).amax(1)
    rows = (last >= 0).nonzero()[:, 0]  # rows that are not skipped
    rewards[rows, last[rows]] += experience.scores[rows]
    return rewards


def response_scores(experience: Experience, kl_coeff: float, estimator: str) -> Tensor:
    """Compute scores minus β times each response's KL, (N,); NaN for skipped responses."""
    # Invalid scores may be infinite; the group statistics ignore only NaN.
    scores = experience.scores.masked_fill(~experience.valid, torch.nan)
    if kl_coeff:
        scores = scores - kl_coeff * experience.divergence(estimator).sum(1)
    return scores


def spread_over_tokens(advantages: Tensor, experience: Experience) -> Tensor:
    """Repeat each response's advantage at its tokens, (N, S) float32, 0 elsewhere."""
    return advantages[:, None].float() * experience.mask
