"""DPO: prefer the chosen answer, by the log-ratios of policy to reference.

Rafailov et al., 2023, equation 7; label smoothing as in Mitchell, 2023 ("conservative DPO").
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
        chosen: log-probability of each chosen answer under the policy, (P,).
        rejected: log-probability of each rejected answer under the policy, (P,).
        reference_chosen: log-probability of each chosen answer under the reference, (P,).
        reference_rejected: log-probability of each rejected answer under the reference, (P,).
        beta: β, strength of the implicit KL constraint.
        label_smoothing: ε, assumed fraction of pairs with swapped labels.

    Returns:
        Loss per pair, (P,).
    """
    h = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    return -(1 - label_smoothing) * F.logsigmoid(h) - label_smoothing * F.logsigmoid(-h)


def row_logprobs(output: Output, batch: Batch) -> Tensor:
    """Sum the target log-probabilities of each row, float32 (B,)."""
    return -output.token_losses(batch["targets"]).sum(1)


def pair_weights(batch: Batch) -> Tensor:
    """Return the weight of each pair, float32 (P,); 0 if either answer has no targets."""
    targets = batch["targets"] != IGNORED
    if targets.shape[0] % 2:
        raise ConfigError(
            f"a batch of pairs must have an even number of rows, got {targets.shape[0]}; use an "
            "even microbatch_size"
        )
    weights = targets.float()
    if "weights" in batch:
        weights = weights * batch["weights"].float()
    # The weight of a row is that of its tokens; a pair has the smaller weight of its two rows.
    return weights.amax(1).view(-1, 2).amin(1)


@frozen(kw_only=True, slots=False)  # the trainer inherits from more than one
class DPOOptions:
    """Settings of DPO."""

    beta: float = field(default=0.1, validator=number(minimum=1e-6))
    """β: strength of the constraint to stay near the reference."""
    label_smoothing: float = field(default=0.0, validator=number(below=0.5))
    """Assumed fraction of pairs with swapped labels."""
    reference_free: bool = field(default=False, validator=flag)
    """Use a uniform reference instead of a reference model."""


@frozen(kw_only=True, slots=False)
class DPOLoss(DPOOptions):
    """Mean DPO loss of a batch of pairs.

    Reads `targets`, optionally `weights`, and `reference_logprobs` (B,) unless `reference_free`.
    """

    statistics = ("accuracy", "margin", "reward_chosen", "reward_rejected")
    """Accuracy, margin and values of the implicit rewards β·log(policy / reference)."""

    def weight(self, batch: Batch) -> float:
        """Sum the weights of all pairs."""
        return float(pair_weights(batch).sum())

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weighted sum over pairs and the sums of the statistics."""
        weights = pair_weights(batch)
        logprobs = row_logprobs(output, batch)  # (B,)
        reference = (
            torch.zeros_like(logprobs) if self.reference_free else batch["reference_logprobs"]
        )
        (chosen, rejected), (reference_chosen, reference_rejected) = (
            logprobs.view(-1, 2).T,
            reference.view(-1, 2).T,
        )
        losses = dpo_loss(
            chosen,
            rejected,
            reference_chosen,
            reference_rejected,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
        )
        with torch.no_grad():
            # implicit rewards (P, 2): chosen, rejected
            rewards = self.beta * (logprobs - reference).view(-1, 2)
            gap = rewards[:, 0] - rewards[:, 1]
            statistics = torch.stack(((gap > 0).float(), gap, rewards[:, 0], rewards[:, 1]))
        return (losses * weights).sum(), (statistics * weights).sum(1)
