"""The reward model's loss: the chosen answer scores higher than the rejected one.

Bradley and Terry, 1952, with the margin of Touvron et al. ("Llama 2"), 2023, equation 2, and the
centring of Eisenstein et al., 2023. Rows as in `losses/dpo.py`. Shapes: B rows, S positions,
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
    chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, *, centring: float = 0.0
) -> Tensor:
    """Compute -log sigmoid(chosen - rejected - margin) + centring·(chosen + rejected)².

    Args:
        chosen: scores (P,).
        rejected: scores (P,).
        margin: by how much the chosen one should be ahead, (P,) or a number.
        centring: keeps scores around 0, which the difference alone doesn't.

    Returns:
        (P,).
    """
    loss = -F.logsigmoid(chosen - rejected - margin)
    return loss + centring * (chosen + rejected).square() if centring else loss


def row_scores(output: Output, batch: Batch, head: str) -> Tensor:
    """Read a head's score at the last token of each row's first document, float32 (B,).

    Raises:
        DataError: the batch does not say where a row's first document ends.
    """
    if "documents" not in batch:
        raise DataError(
            "the batch has no `documents`, so where each answer ends is not known; give them, 0 "
            "at a row's tokens and 1 behind its end"
        )
    scores = output.head(head)[..., 0]
    last = (batch["documents"] == 0).sum(1) - 1
    if bool((last < 0).any()):
        raise DataError("a row of the batch has no document 0 to score; leave such pairs out")
    return scores.gather(1, last[:, None])[:, 0]


@frozen(kw_only=True)
class PairwiseLoss:
    """Mean pairwise loss of a batch of pairs.

    Reads `documents` (the rest of a row behind its end is another document), `targets`, by choice
    `weights` and `margin` (B,).
    """

    margin_scale: float = field(default=1.0, validator=number())
    """Factor of the data's margins; 0 leaves them out."""
    centring: float = field(default=0.0, validator=number())
    head: str = "score"

    statistics = ("accuracy", "gap", "mean_score")
    """How often the chosen one scores higher, by how much, and where scores lie."""

    def weight(self, batch: Batch) -> float:
        """Sum the weights of all pairs."""
        return float(pair_weights(batch).sum())

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the weighted sum over pairs, and the statistics' sums."""
        weights = pair_weights(batch)
        chosen, rejected = row_scores(output, batch, self.head).view(-1, 2).T
        margin = batch["margin"].view(-1, 2)[:, 0] if "margin" in batch else 0.0
        losses = pairwise_loss(chosen, rejected, self.margin_scale * margin, centring=self.centring)
        with torch.no_grad():
            gap = chosen - rejected
            statistics = torch.stack(((gap > 0).float(), gap, (chosen + rejected) / 2))
        return (losses * weights).sum(), (statistics * weights).sum(1)
