"""Losses of DPO and reward models: golden values, gradients, and required columns."""

import math

import pytest
import torch

from ms_align.errors import ConfigError, DataError
from ms_align.losses.dpo import DPOLoss, dpo_loss
from ms_align.losses.pairwise import PairwiseLoss, pairwise_loss


def test_dpo_has_its_golden_values() -> None:
    """Worked by hand: h = 0.1·((-10+12) - (-14+13)) = 0.3; -log sigmoid(0.3) = 0.554355."""
    given = [torch.tensor([value]) for value in (-10.0, -14.0, -12.0, -13.0)]
    assert dpo_loss(*given, beta=0.1).item() == pytest.approx(0.5543552, abs=1e-6)
    # 0.9 · 0.5543552 + 0.1 · (0.5543552 + 0.3)
    smoothed = dpo_loss(*given, beta=0.1, label_smoothing=0.1)
    assert smoothed.item() == pytest.approx(0.5843552, abs=1e-6)
    equal = dpo_loss(*(torch.zeros(1) for _ in range(4)), beta=0.5)
    assert equal.item() == pytest.approx(math.log(2))


def test_dpo_has_the_gradient_of_the_paper() -> None:
    """-β·sigmoid(-βh) for the chosen log-probability and its negative for the rejected one."""
    chosen, rejected = (torch.tensor([v], requires_grad=True) for v in (-3.0, -2.5))
    dpo_loss(chosen, rejected, torch.tensor([-2.0]), torch.tensor([-4.0]), beta=0.4).backward()
    h = 0.4 * ((-3.0 + 2.0) - (-2.5 + 4.0))
    wanted = -0.4 / (1 + math.exp(h))
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.item() == pytest.approx(wanted, abs=1e-6)
    assert rejected.grad.item() == pytest.approx(-wanted, abs=1e-6)


def test_pairwise_has_its_golden_values() -> None:
    """-log sigmoid(1.5 - 0.5 - 0.25) = 0.386871; centering adds 0.01·(1.5 + 0.5)² = 0.04."""
    chosen, rejected = torch.tensor([1.5]), torch.tensor([0.5])
    loss = pairwise_loss(chosen, rejected, 0.25)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-0.75)), abs=1e-6)
    centred = pairwise_loss(chosen, rejected, 0.25, center_rewards_coefficient=0.01)
    assert centred.item() == pytest.approx(loss.item() + 0.04, abs=1e-6)


class Fixed:
    """Output with fixed token losses and scores."""

    def __init__(self, losses: torch.Tensor, scores: torch.Tensor) -> None:
        self.losses, self.scores = losses, scores

    def token_losses(self, targets: torch.Tensor) -> torch.Tensor:
        """The fixed losses at targets."""
        return self.losses * (targets != -100)

    def head(self, name: str) -> torch.Tensor:
        """The fixed scores."""
        return self.scores[..., None]


BATCH = {
    "tokens": torch.zeros(4, 3, dtype=torch.int64),
    "targets": torch.tensor([[1, 1, -100], [-100, 1, 1], [1, -100, -100], [1, 1, 1]]),
    "weights": torch.tensor([[1.0, 1, 0], [0, 1, 1], [3, 0, 0], [3, 3, 3]]),
    "documents": torch.tensor([[0, 0, 1], [0, 0, 0], [0, 1, 1], [0, 0, 0]], dtype=torch.int32),
    "margin": torch.tensor([0.5, 0.5, 1.0, 1.0]),
    "reference_logprobs": torch.tensor([-1.0, -2.0, -3.0, -4.0]),
}
OUTPUT = Fixed(torch.arange(12.0).view(4, 3), torch.arange(12.0).view(4, 3) / 4)


def test_rows_are_summed_paired_and_weighted() -> None:
    """Compared with the pure loss on sums worked by hand, weights 1 and 3."""
    loss = DPOLoss(beta=0.2)
    total, figures = loss(OUTPUT, BATCH)  # type: ignore[arg-type]
    own = torch.tensor([-(0.0 + 1), -(4.0 + 5), -6.0, -(9.0 + 10 + 11)])
    by_hand = dpo_loss(own[::2], own[1::2], *BATCH["reference_logprobs"].view(2, 2).T, beta=0.2)
    assert loss.weight(BATCH) == 4.0
    assert total.item() == pytest.approx((by_hand * torch.tensor([1.0, 3.0])).sum().item())
    assert figures[0].item() == 4.0  # both chosen ones are ahead
    free = DPOLoss(beta=0.2, reference_free=True)
    del_reference = {k: v for k, v in BATCH.items() if k != "reference_logprobs"}
    zero = torch.zeros(2)
    by_hand = dpo_loss(own[::2], own[1::2], zero, zero, beta=0.2)
    total, _ = free(OUTPUT, del_reference)  # type: ignore[arg-type]
    assert total.item() == pytest.approx((by_hand * torch.tensor([1.0, 3.0])).sum().item())


def test_scores_are_read_at_the_last_token_of_the_answer() -> None:
    """Padding after the answer has no influence."""
    loss = PairwiseLoss(center_rewards_coefficient=0.1)
    total, _ = loss(OUTPUT, BATCH)  # type: ignore[arg-type]
    chosen, rejected = torch.tensor([1.0, 6.0]) / 4, torch.tensor([5.0, 11.0]) / 4
    by_hand = pairwise_loss(
        chosen, rejected, torch.tensor([0.5, 1.0]), center_rewards_coefficient=0.1
    )
    assert total.item() == pytest.approx((by_hand * torch.tensor([1.0, 3.0])).sum().item())


def test_a_row_without_a_known_end_is_rejected() -> None:
    """Instead of scoring whatever token is last."""
    without = {name: value for name, value in BATCH.items() if name != "documents"}
    with pytest.raises(DataError, match="must have `documents`"):
        PairwiseLoss()(OUTPUT, without)  # type: ignore[arg-type]
    nothing = {**BATCH, "documents": torch.ones(4, 3, dtype=torch.int32)}
    with pytest.raises(DataError, match="must have a document 0"):
        PairwiseLoss()(OUTPUT, nothing)  # type: ignore[arg-type]


def test_an_odd_number_of_rows_is_rejected() -> None:
    """Rows come in pairs."""
    with pytest.raises(ConfigError, match="even microbatch_size"):
        DPOLoss().weight({"targets": torch.zeros(3, 2, dtype=torch.int64)})
