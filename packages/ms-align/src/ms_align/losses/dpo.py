"""The loss of a batch of preference pairs; the formulas are in `losses/preference.py`.

Rows 2i and 2i + 1 of a batch are the chosen and the rejected answer of pair i. Shapes: B rows,
S positions, P = B / 2 pairs.
"""

import torch
from attrs import frozen
from torch import Tensor

from ms_align.errors import ConfigError
from ms_align.losses.preference import LOSSES, PER_TOKEN, DPOOptions, Pairs
from ms_align.losses.protocol import IGNORED, Batch, Output


@frozen(kw_only=True, slots=False)
class DPOLoss(DPOOptions):
    """Mean preference loss of a batch of pairs.

    Reads `targets`, optionally `weights`, and `reference_logprobs` (B,) if `needs_reference`.
    """

    statistics = ("accuracy", "margin", "reward_chosen", "reward_rejected")
    """Accuracy, margin and values of the implicit rewards β·log(π/π_ref)."""

    def weight(self, batch: Batch) -> float:
        """Sum the weights of all pairs."""
        return float(pair_weights(batch).sum())

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weighted sum over pairs and the sums of the statistics."""
        weights = pair_weights(batch)
        pairs = self.pairs(self.row_logprobs(output, batch), batch)
        with torch.no_grad():
            chosen, rejected = self.rewards(pairs)
            gap = chosen - rejected
            statistics = torch.stack(((gap > 0).float(), gap, chosen, rejected))
        return (self.losses(pairs) * weights).sum(), (statistics * weights).sum(1)

    def row_logprobs(self, output: Output, batch: Batch) -> Tensor:
        """Sum the target log-probabilities of each row, float32 (B,).

        With `ld_alpha`, tokens beyond the length of the pair's shorter answer count α: Liu et al.,
        2024 ("LD-DPO"), equation 9.
        """
        logprobs = -output.token_losses(batch["targets"])  # (B, S)
        if self.ld_alpha is None:
            return logprobs.sum(1)
        position = (batch["targets"] != IGNORED).cumsum(1)  # 1 at an answer's first token
        shorter = position[:, -1].view(-1, 2).amin(1).repeat_interleave(2)  # (B,)
        return torch.where(position > shorter[:, None], self.ld_alpha * logprobs, logprobs).sum(1)

    def pairs(self, logprobs: Tensor, batch: Batch) -> Pairs:
        """Split row sums (B,) and the batch's `reference_logprobs` into pairs."""
        reference = torch.zeros_like(logprobs)
        if self.needs_reference:
            reference = batch["reference_logprobs"].to(logprobs)
        tokens = (batch["targets"] != IGNORED).sum(1).clamp(min=1).to(logprobs)
        (
            (chosen, rejected),
            (reference_chosen, reference_rejected),
            (chosen_tokens, rejected_tokens),
        ) = (column.view(-1, 2).T for column in (logprobs, reference, tokens))
        return Pairs(
            chosen=chosen,
            rejected=rejected,
            reference_chosen=reference_chosen,
            reference_rejected=reference_rejected,
            chosen_tokens=chosen_tokens,
            rejected_tokens=rejected_tokens,
        )

    def losses(self, pairs: Pairs) -> Tensor:
        """Compute the loss of each pair, (P,): the weighted sum of the losses in `loss_type`."""
        weights = self.loss_weights or [1.0] * len(self.loss_names)
        terms = [
            weight * LOSSES[name](pairs, self)
            for name, weight in zip(self.loss_names, weights, strict=True)
        ]
        return torch.stack(terms).sum(0)

    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Compute the implicit rewards of the chosen and the rejected answers, (P,) each."""
        chosen, rejected = self.beta * pairs.chosen_ratio, self.beta * pairs.rejected_ratio
        if PER_TOKEN.issuperset(self.loss_names):
            return chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens
        return chosen, rejected


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
    # All tokens of a row have one weight; a pair gets the smaller weight of its two rows.
    return weights.amax(1).view(-1, 2).amin(1)
