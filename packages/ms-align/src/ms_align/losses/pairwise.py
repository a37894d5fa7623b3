"""Reward model loss: the chosen answer must score higher than the rejected one.

Bradley and Terry, 1952, with the margin of Touvron et al. ("Llama 2"), 2023, equation 2, and the
centering of Eisenstein et al., 2023. Rows as in `losses/dpo.py`. Shapes: B rows, S positions,
P = B / 2 pairs.
"""

import torch
import torch.nn.functional as F
from attrs import field, frozen
from torch import Tensor

from ms_align.errors import DataError
from ms_align.losses.dpo import pair_weights
from ms_align.losses.protocol import Batch, Output
from ms_align.settings import number


def pairwise_loss(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | float = 0.0,
    *,
    center_rewards_coefficient: float = 0.0,
) -> Tensor:
    """Compute -log sigmoid(chosen - rejected - margin) + c·(chosen + rejected)².

    c is `center_rewards_coefficient`.

    Args:
        chosen: scores (P,).
        rejected: scores (P,).
        margin: required score difference, (P,) or a number.
        center_rewards_coefficient: weight of the term that keeps scores around 0.

    Returns:
        Loss per pair, (P,).
    """
    loss = -F.logsigmoid(chosen - rejected - margin)
    return (
        loss + center_rewards_coefficient * (chosen + rejected).square()
        if center_rewards_coefficient
        else loss
    )


def row_scores(output: Output, batch: Batch, head: str) -> Tensor:
    """Return a head's score at the last token of each row's first document, float32 (B,).

    Raises:
        DataError: the batch has no `documents`, or a row has no document 0.
    """
    if "documents" not in batch:
        raise DataError(
            "a batch of pairs must have `documents` to find the end of each answer, got none; add "
            "them: 0 at a row's tokens and 1 after its end"
        )
    scores = output.head(head)[..., 0]  # (B, S)
    # Document 0 is the answer, from the start of the row.
    last = (batch["documents"] == 0).sum(1) - 1
    if bool((last < 0).any()):
        raise DataError("every row must have a document 0 to score, got one without; drop its pair")
    return scores.gather(1, last[:, None])[:, 0]


@frozen(kw_only=True)
class PairwiseLoss:
    """Mean pairwise loss of a batch of pairs.

    Reads `documents` (0 for the answer, 1 for the rest of the row), `targets`, and optionally
    `weights` and `margin` (B,).
    """

    margin_scale: float = field(default=1.0, validator=number())
    """Factor for the margins in the dataset; 0 ignores them."""
    center_rewards_coefficient: float = field(default=0.0, validator=number())
    head: str = "score"

    statistics = ("accuracy", "gap", "mean_score")
    """Accuracy, score gap and mean score."""

    def weight(self, batch: Batch) -> float:
        """Sum the weights of all pairs."""
        return float(pair_weights(batch).sum())

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weighted sum over pairs and the sums of the statistics."""
        weights = pair_weights(batch)
        # rows alternate: chosen, rejected
        chosen, rejected = row_scores(output, batch, self.head).view(-1, 2).T
        margin = batch["margin"].view(-1, 2)[:, 0] if "margin" in batch else 0.0  # (P,)
        losses = pairwise_loss(
            chosen,
            rejected,
            self.margin_scale * margin,
            center_rewards_coefficient=self.center_rewards_coefficient,
        )
        with torch.no_grad():
            gap = chosen - rejected
            statistics = torch.stack(((gap > 0).float(), gap, (chosen + rejected) / 2))
        return (losses * weights).sum(), (statistics * weights).sum(1)
