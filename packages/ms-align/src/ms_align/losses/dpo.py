"""DPO: prefer the chosen answer by the log-ratio of policy to reference.

Rafailov et al., 2023, equation 7; label smoothing is that of Mitchell, 2023 ("conservative DPO").
Rows 2i and 2i + 1 of a batch are the chosen and the rejected part of pair i. Shapes: B rows,
S positions, P = B / 2 pairs.
"""

import torch
import torch.nn.functional as F
from attrs import field, frozen
from torch import Tensor

from ms_align.errors import ConfigError
from ms_align.losses.protocol import IGNORED, Batch, Output
from ms_align.settings import flag, number


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute -(1-ε)·log sigmoid(βh) - ε·log sigmoid(-βh).

    h = (chosen - reference_chosen) - (rejected - reference_rejected).

    Args:
        chosen: log-probability of the whole chosen answer, (P,).
        rejected: likewise.
        reference_chosen: the same by the reference, (P,).
        reference_rejected: likewise.
        beta: how strongly the reference holds.
        label_smoothing: ε, the share of pairs that are taken to be the wrong way round.

    Returns:
        (P,).
    """
    h = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    return -(1 - label_smoothing) * F.logsigmoid(h) - label_smoothing * F.logsigmoid(-h)


def row_logprobs(output: Output, batch: Batch) -> Tensor:
    """Sum the log-probabilities of each row's targets, float32 (B,)."""
    return -output.token_losses(batch["targets"]).sum(1)


def pair_weights(batch: Batch) -> Tensor:
    """Compute how much each pair counts, float32 (P,); 0 for a pair without targets."""
    targets = batch["targets"] != IGNORED
    if targets.shape[0] % 2:
        raise ConfigError(
            f"{targets.shape[0]} rows do not hold whole pairs; choose an even microbatch_size"
        )
    weights = targets.float()
    if "weights" in batch:
        weights = weights * batch["weights"].float()
    return weights.amax(1).view(-1, 2).amin(1)


@frozen(kw_only=True, slots=False)  # the trainer inherits from more than one
class DPOOptions:
    """DPO's own settings."""

    beta: float = field(default=0.1, validator=number(least=1e-6))
    """How strongly the policy is held to the reference."""
    label_smoothing: float = field(default=0.0, validator=number(below=0.5))
    """Share of pairs that are taken to be the wrong way round."""
    reference_free: bool = field(default=False, validator=flag)
    """Take the reference to be uniform: only the policy's own ratio counts."""


@frozen(kw_only=True, slots=False)
class DPOLoss(DPOOptions):
    """Mean DPO loss of a batch of pairs.

    Reads `targets`, by choice `weights`, and `reference_logprobs` (B,) unless `reference_free`.
    """

    statistics = ("accuracy", "margin", "reward_chosen", "reward_rejected")
    """Implicit rewards β·log(policy / reference), and how often the chosen one's is higher."""

    def weight(self, batch: Batch) -> float:
        """Sum the weights of all pairs."""
        return float(pair_weights(batch).sum())

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the weighted sum over pairs, and the statistics' sums."""
        weights = pair_weights(batch)
        own = row_logprobs(output, batch)
        reference = torch.zeros_like(own) if self.reference_free else batch["reference_logprobs"]
        (chosen, rejected), (of_chosen, of_rejected) = own.view(-1, 2).T, reference.view(-1, 2).T
        losses = dpo_loss(
            chosen,
            rejected,
            of_chosen,
            of_rejected,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
        )
        with torch.no_grad():
            rewards = self.beta * (own - reference).view(-1, 2)
            gap = rewards[:, 0] - rewards[:, 1]
            statistics = torch.stack(((gap > 0).float(), gap, rewards[:, 0], rewards[:, 1]))
        return (losses * weights).sum(), (statistics * weights).sum(1)
