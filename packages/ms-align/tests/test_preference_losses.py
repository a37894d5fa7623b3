"""Losses of DPO variants and reward models: values, gradients, required columns."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ms_align.errors import ConfigError, DataError
from ms_align.losses.dpo import DPOLoss
from ms_align.losses.pairwise import PairwiseLoss, pairwise_loss
from ms_align.losses.preference import LOSSES, OF_DIFFERENCE, WITHOUT_REFERENCE, Pairs, log1mexp

REQUIRED_OPTIONS: dict[str, dict[str, Any]] = {"exo_pair": {"label_smoothing": 1e-3}}
"""Settings that a loss requires."""


def make_pair(*values: float) -> Pairs:
    """Build one pair: chosen, rejected, reference_chosen, reference_rejected, and token counts."""
    tensors = [torch.tensor([value], dtype=torch.float64) for value in values]
    names = ("chosen", "rejected", "reference_chosen", "reference_rejected")
    counts = tensors[4:] or [torch.ones(1, dtype=torch.float64)] * 2
    return Pairs(
        **dict(zip(names, tensors, strict=False)),
        chosen_tokens=counts[0],
        rejected_tokens=counts[1],
    )


def test_dpo_has_its_golden_values() -> None:
    """Hand-computed: Δ = (-10+12) - (-14+13) = 3; -log sigmoid(0.1·3) = 0.554355."""
    pairs = make_pair(-10.0, -14.0, -12.0, -13.0)
    assert DPOLoss(beta=0.1).losses(pairs).item() == pytest.approx(0.5543552, abs=1e-6)
    # 0.9 · 0.5543552 + 0.1 · (0.5543552 + 0.3)
    smoothed = DPOLoss(beta=0.1, label_smoothing=0.1).losses(pairs)
    assert smoothed.item() == pytest.approx(0.5843552, abs=1e-6)
    equal = DPOLoss(beta=0.5).losses(make_pair(0.0, 0.0, 0.0, 0.0))
    assert equal.item() == pytest.approx(math.log(2))


def test_dpo_has_the_gradient_of_the_paper() -> None:
    """-β·sigmoid(-βΔ) for the chosen log-probability and its negative for the rejected one."""
    pairs = make_pair(-3.0, -2.5, -2.0, -4.0)
    pairs.chosen.requires_grad_()
    pairs.rejected.requires_grad_()
    DPOLoss(beta=0.4).losses(pairs).backward()
    logit = 0.4 * ((-3.0 + 2.0) - (-2.5 + 4.0))
    expected = -0.4 / (1 + math.exp(logit))
    assert pairs.chosen.grad is not None
    assert pairs.rejected.grad is not None
    assert pairs.chosen.grad.item() == pytest.approx(expected, abs=1e-9)
    assert pairs.rejected.grad.item() == pytest.approx(-expected, abs=1e-9)


# By hand with beta = 0.5: c = -8 + 10 = 2, r = -9 + 6 = -3, Δ = 5; 4 and 3 tokens.
HAND_PAIR = (-8.0, -9.0, -10.0, -6.0, 4.0, 3.0)


def sigmoid(x: float) -> float:
    """Compute the logistic function."""
    return 1 / (1 + math.exp(-x))


GOLDEN = {
    "sigmoid": -math.log(sigmoid(2.5)),
    "sigmoid_norm": -math.log(sigmoid(0.5 * (2 / 4 + 3 / 3))),
    "hinge": 0.0,  # 1 - 2.5 < 0
    "ipo": (2 / 4 + 3 / 3 - 1.0) ** 2,
    "exo_pair": sigmoid(2.5) * math.log(sigmoid(2.5) / 0.999)
    + sigmoid(-2.5) * math.log(sigmoid(-2.5) / 0.001),
    "nca_pair": -math.log(sigmoid(1.0))
    - 0.5 * math.log(sigmoid(-1.0))
    - 0.5 * math.log(sigmoid(1.5)),
    "robust": -math.log(sigmoid(2.5)),
    "bco_pair": -math.log(sigmoid(1.0)) - math.log(sigmoid(1.5)),
    "sppo_hard": (2 - 1) ** 2 + (-3 + 1) ** 2,
    "apo_zero": 1 - sigmoid(1.0) + sigmoid(-1.5),
    "apo_down": sigmoid(1.0) + 1 - sigmoid(2.5),
    "discopop": -math.log(sigmoid(2.5)) * (1 - sigmoid(50)) + math.exp(-2.5) * sigmoid(50),
    "sft": 8 / 4,
    "simpo": -math.log(sigmoid(0.5 * (-2 + 3) - 0.5)),
    "cpo": -math.log(sigmoid(0.5 * (-8 + 9))) + 8 / 4,
    "orpo": 2
    - 0.5 * math.log(sigmoid((-2 + 3) - math.log(1 - math.exp(-2)) + math.log(1 - math.exp(-3)))),
}


def test_every_loss_has_a_golden_value() -> None:
    """A new loss cannot be added without one."""
    assert GOLDEN.keys() == LOSSES.keys()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_its_golden_value(name: str) -> None:
    """Computed by hand from the formula of the paper."""
    loss = DPOLoss(loss_type=name, beta=0.5, **REQUIRED_OPTIONS.get(name, {}))
    assert loss.losses(make_pair(*HAND_PAIR)).item() == pytest.approx(GOLDEN[name], abs=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_finite_at_extreme_log_probabilities(name: str) -> None:
    """Includes an answer with probability 1 and ratios that overflow."""
    loss = DPOLoss(loss_type=name, **REQUIRED_OPTIONS.get(name, {}))
    for chosen, rejected in ((0.0, -900.0), (-900.0, 0.0), (-1e-9, -1e-9)):
        values = torch.tensor([[chosen], [rejected]], requires_grad=True)
        zero = torch.zeros(1)
        pairs = Pairs(
            chosen=values[0],
            rejected=values[1],
            reference_chosen=zero,
            reference_rejected=zero,
            chosen_tokens=zero + 3,
            rejected_tokens=zero + 3,
        )
        if name == "discopop" and rejected > chosen:
            continue  # its exponential term is unbounded by definition
        loss.losses(pairs).sum().backward()
        assert values.grad is not None
        assert bool(values.grad.isfinite().all()), (name, chosen, rejected)


def test_a_list_of_losses_is_their_weighted_sum() -> None:
    """As in TRL: 0.8·sigmoid + 0.2·bco_pair + 1·sft is the loss of MPO."""
    loss = DPOLoss(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1], beta=0.5)
    expected = 0.8 * GOLDEN["sigmoid"] + 0.2 * GOLDEN["bco_pair"] + GOLDEN["sft"]
    assert loss.losses(make_pair(*HAND_PAIR)).item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("divergence", "difference"),
    [
        ("reverse_kl", 5.0),
        ("forward_kl", (1 - math.exp(-2)) - (1 - math.exp(3))),
        ("js_divergence", math.log(sigmoid(2)) - math.log(sigmoid(-3))),
        ("alpha_divergence", (math.exp(-0.5 * 2) - 1) / -0.5 - (math.exp(0.5 * 3) - 1) / -0.5),
    ],
)
def test_f_divergences_replace_the_log_ratios(divergence: str, difference: float) -> None:
    """f'(π/π_ref) of both answers, computed by hand; sigmoid and hinge use them the same way."""
    for name, expected in (
        ("sigmoid", -math.log(sigmoid(0.1 * difference))),
        ("hinge", max(0.0, 1 - 0.1 * difference)),
    ):
        loss = DPOLoss(loss_type=name, f_divergence_type=divergence)
        assert loss.losses(make_pair(*HAND_PAIR)).item() == pytest.approx(expected, abs=1e-9)


def test_log1mexp_is_exact_near_both_ends() -> None:
    """Against float64 with expm1, from -1e-6 to -50."""
    x = torch.tensor([-1e-6, -0.1, -0.69, -0.7, -5.0, -50.0], dtype=torch.float64)
    assert torch.allclose(log1mexp(x), torch.log(-torch.expm1(x)), rtol=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "ippo"}, "did you mean 'ipo'"),
        ({"loss_type": []}, "a list of different names, got \\[\\]"),
        ({"loss_type": ["ipo", "ipo"]}, "a list of different names, got"),
        ({"loss_type": 3}, "a list of different names, got 3"),
        ({"loss_type": ["ipo", "sft"], "loss_weights": [1.0]}, "one number for each of the 2"),
        ({"loss_weights": ["a"]}, "loss_weights must be a number of at least 0, got 'a'"),
        ({"loss_type": "exo_pair"}, "must be above 0 for exo_pair"),
        (
            {"loss_type": "apo_zero", "f_divergence_type": "forward_kl"},
            "must be 'reverse_kl' for apo_zero",
        ),
        ({"f_divergence_type": "kl"}, "f_divergence_type is 'kl'"),
        ({"loss_type": "simpo", "ld_alpha": 0.5}, "ld_alpha cannot be used with simpo"),
        ({"ld_alpha": 1.5}, "ld_alpha must be a number of at least 0 and at most 1, got 1.5"),
    ],
)
def test_incompatible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    """One line says what to change."""
    with pytest.raises(ConfigError, match=message):
        DPOLoss(**settings)


def test_only_losses_of_ratios_need_a_reference() -> None:
    """A list needs one if any of its losses does."""
    free = {
        name
        for name in LOSSES
        if not DPOLoss(loss_type=name, **REQUIRED_OPTIONS.get(name, {})).needs_reference
    }
    assert free == WITHOUT_REFERENCE
    assert DPOLoss(loss_type=["sft", "ipo"]).needs_reference
    assert not DPOLoss(reference_free=True).needs_reference
    assert LOSSES.keys() >= OF_DIFFERENCE


def test_pairwise_has_its_golden_values() -> None:
    """-log sigmoid(1.5 - 0.5 - 0.25) = 0.386871; centering adds 0.01·(1.5 + 0.5)² = 0.04."""
    chosen, rejected = torch.tensor([1.5]), torch.tensor([0.5])
    loss = pairwise_loss(chosen, rejected, 0.25)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-0.75)), abs=1e-6)
    centered = pairwise_loss(chosen, rejected, 0.25, center_rewards_coefficient=0.01)
    assert centered.item() == pytest.approx(loss.item() + 0.04, abs=1e-6)


class FixedOutput:
    """Output with fixed token losses and scores."""

    def __init__(self, losses: torch.Tensor, scores: torch.Tensor) -> None:
        self.losses, self.scores = losses, scores

    def token_losses(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the fixed losses at targets."""
        return self.losses * (targets != -100)

    def head(self, name: str) -> torch.Tensor:
        """Return the fixed scores."""
        return self.scores[..., None]


BATCH = {
    "tokens": torch.zeros(4, 3, dtype=torch.int64),
    "targets": torch.tensor([[1, 1, -100], [-100, 1, 1], [1, -100, -100], [1, 1, 1]]),
    "weights": torch.tensor([[1.0, 1, 0], [0, 1, 1], [3, 0, 0], [3, 3, 3]]),
    "documents": torch.tensor([[0, 0, 1], [0, 0, 0], [0, 1, 1], [0, 0, 0]], dtype=torch.int32),
    "margin": torch.tensor([0.5, 0.5, 1.0, 1.0]),
    "reference_logprobs": torch.tensor([-1.0, -2.0, -3.0, -4.0]),
}
OUTPUT: Any = FixedOutput(torch.arange(12.0).view(4, 3), torch.arange(12.0).view(4, 3) / 4)
SUMS = torch.tensor([-(0.0 + 1), -(4.0 + 5), -6.0, -(9.0 + 10 + 11)])
"""Row sums of log-probabilities in `OUTPUT` at the targets of `BATCH`."""


def dpo_by_hand(sums: torch.Tensor, reference: torch.Tensor) -> float:
    """Compute the weighted DPO loss of two pairs, β = 0.2, weights 1 and 3."""
    ratios = sums - reference
    losses = -F.logsigmoid(0.2 * (ratios[::2] - ratios[1::2]))
    return float((losses * torch.tensor([1.0, 3.0])).sum())


def test_rows_are_summed_paired_and_weighted() -> None:
    """With and without a reference."""
    loss = DPOLoss(beta=0.2)
    total, statistics = loss(OUTPUT, BATCH)
    assert loss.weight(BATCH) == 4.0
    assert total.item() == pytest.approx(dpo_by_hand(SUMS, BATCH["reference_logprobs"]))
    assert statistics[0].item() == 4.0  # both chosen answers are ahead
    without_reference = {k: v for k, v in BATCH.items() if k != "reference_logprobs"}
    total, _ = DPOLoss(beta=0.2, reference_free=True)(OUTPUT, without_reference)
    assert total.item() == pytest.approx(dpo_by_hand(SUMS, torch.zeros(4)))


def test_token_means_divide_by_target_tokens() -> None:
    """SimPO on rows of 2, 2, 1 and 3 targets."""
    total, _ = DPOLoss(loss_type="simpo", beta=2.0)(OUTPUT, BATCH)
    means = SUMS / torch.tensor([2.0, 2.0, 1.0, 3.0])
    losses = -F.logsigmoid(2.0 * (means[::2] - means[1::2]) - 0.5)
    assert total.item() == pytest.approx(float((losses * torch.tensor([1.0, 3.0])).sum()))


def test_ld_alpha_weighs_the_tail_of_the_longer_answer() -> None:
    """The first pair has equal lengths; in the second, the rejected answer is 2 tokens longer."""
    total, _ = DPOLoss(beta=0.2, ld_alpha=0.25)(OUTPUT, BATCH)
    sums = SUMS.clone()
    sums[3] = -(9.0 + 0.25 * (10 + 11))
    assert total.item() == pytest.approx(dpo_by_hand(sums, BATCH["reference_logprobs"]))
    plain, _ = DPOLoss(beta=0.2, ld_alpha=1.0)(OUTPUT, BATCH)
    assert plain.item() == pytest.approx(dpo_by_hand(SUMS, BATCH["reference_logprobs"]))


def test_scores_are_read_at_the_last_token_of_the_answer() -> None:
    """Padding after the answer has no influence."""
    loss = PairwiseLoss(center_rewards_coefficient=0.1)
    total, _ = loss(OUTPUT, BATCH)
    chosen, rejected = torch.tensor([1.0, 6.0]) / 4, torch.tensor([5.0, 11.0]) / 4
    expected = pairwise_loss(
        chosen, rejected, torch.tensor([0.5, 1.0]), center_rewards_coefficient=0.1
    )
    assert total.item() == pytest.approx((expected * torch.tensor([1.0, 3.0])).sum().item())


def test_a_row_without_a_known_end_is_rejected() -> None:
    """Otherwise an arbitrary last token would be scored."""
    without = {name: value for name, value in BATCH.items() if name != "documents"}
    with pytest.raises(DataError, match="must have `documents`"):
        PairwiseLoss()(OUTPUT, without)
    no_document_0 = {**BATCH, "documents": torch.ones(4, 3, dtype=torch.int32)}
    with pytest.raises(DataError, match="must have a document 0"):
        PairwiseLoss()(OUTPUT, no_document_0)


def test_an_odd_number_of_rows_is_rejected() -> None:
    """Rows come in pairs."""
    with pytest.raises(ConfigError, match="even microbatch_size"):
        DPOLoss().weight({"targets": torch.zeros(3, 2, dtype=torch.int64)})
