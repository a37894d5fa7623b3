"""Losses of PPO, GRPO and RLOO compared with hand-computed values and plain gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ms_align.errors import ConfigError
from ms_align.losses import token_statistics
from ms_align.losses.policy import PolicyLoss, loss_divisor, per_response
from ms_align.losses.ppo import PPOLoss, ValueLoss, value_loss
from ms_align.losses.protocol import Loss
from ms_align.losses.surrogates import (
    LEVELS,
    LOSS_TYPES,
    SurrogateOptions,
    Terms,
    at_level,
    clipped,
)
from ms_align.losses.token_statistics import (
    Scratch,
    losses_and_entropies,
    projected_losses_and_entropies,
)

LOG = math.log
HAND_TOLERANCE = 1e-6
"""Float32 sums of a few terms."""


class FixedOutput:
    """Output with fixed log-probabilities, entropies and values."""

    def __init__(self, logprobs: Tensor, values: Tensor | None = None) -> None:
        self.logprobs = logprobs
        self.values = values

    def logits(self, positions: slice = slice(None)) -> Tensor:
        """Not used by the losses."""
        raise AssertionError

    def token_losses(self, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
        """Return -log p at targets."""
        return -self.logprobs * (targets != -100)

    def entropies(self, counted: Tensor, *, temperature: float = 1.0) -> Tensor:
        """Return 2 nats at every position."""
        return 2.0 * counted

    def head(self, name: str) -> Tensor:
        """Return the values."""
        assert self.values is not None
        return self.values[..., None]


OLD = torch.tensor([[LOG(0.5), LOG(0.2), 0.0], [LOG(0.4), 0.0, 0.0]])
NEW = torch.tensor([[LOG(0.75), LOG(0.1), 9.0], [LOG(0.44), 9.0, 9.0]])  # ratios 1.5, 0.5; 1.1
BATCH: dict[str, Tensor] = {
    "targets": torch.tensor([[7, 8, -100], [9, -100, -100]]),
    "old_logprobs": OLD,
    "advantages": torch.tensor([[2.0, -1.0, 0.0], [-3.0, 0.0, 0.0]]),
    "reference_logprobs": torch.tensor([[LOG(0.5), LOG(0.2), 0.0], [LOG(0.22), 0.0, 0.0]]),
    "old_values": torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.0]]),
    "returns": torch.tensor([[1.0, 0.0, 0.0], [0.7, 0.0, 0.0]]),
}
VALUES = torch.tensor([[0.5, 0.9, 5.0], [0.9, 5.0, 5.0]])


def loss_and_statistics(loss: Loss, output: Any) -> dict[str, float]:
    """Return the mean loss and the statistics by name."""
    total, figures = loss(output, BATCH)
    weight = loss.weight(BATCH)
    return {
        "loss": float(total) / weight,
        **dict(zip(loss.statistics, (figures / weight).tolist(), strict=True)),
    }


def test_ppo_matches_hand_computed_values() -> None:
    """Ratios 1.5 (clipped at 1.2), 0.5 (clipped at 0.8) and 1.1: -2.4 + 0.8 + 3.3 over 3 tokens."""
    result = loss_and_statistics(PPOLoss(), FixedOutput(NEW))
    assert result["policy_loss"] == pytest.approx((-2.4 + 0.8 + 3.3) / 3, abs=HAND_TOLERANCE)
    assert result["loss"] == pytest.approx(result["policy_loss"], abs=HAND_TOLERANCE)
    assert result["clip_fraction"] == pytest.approx(2 / 3)
    assert result["entropy"] == pytest.approx(2.0)
    k3 = [(r - 1) - LOG(r) for r in (1.5, 0.5, 1.1)]
    assert result["kl_old"] == pytest.approx(sum(k3) / 3, abs=HAND_TOLERANCE)


def test_ppo_adds_value_entropy_and_kl() -> None:
    """Values 0.5 (clipped: 0.2), 0.9 and 0.9 (clipped: 0.7); KL by k2 of ratios 1.5, 0.5, 2."""
    parts = PPOLoss(
        value_coeff=0.1, entropy_coeff=0.01, kl_coeff=0.5, kl_estimator="k2", value_clip=0.2
    )
    result = loss_and_statistics(parts, FixedOutput(NEW, VALUES))
    # (0.5-1)² = 0.25 < (0.2-1)² = 0.64; 0.81 = (0.9-0)²; (0.9-0.7)² = 0.04 > (0.7-0.7)².
    value = 0.5 * (0.64 + 0.81 + 0.04) / 3
    assert result["value_loss"] == pytest.approx(value, abs=HAND_TOLERANCE)
    assert result["value_clip_fraction"] == pytest.approx(1 / 3)
    k2 = sum(0.5 * LOG(r) ** 2 for r in (1.5, 0.5, 2.0)) / 3
    assert result["kl_loss"] == pytest.approx(k2, abs=HAND_TOLERANCE)
    policy = (-2.4 + 0.8 + 3.3) / 3
    expected = policy + 0.1 * value - 0.01 * 2 + 0.5 * k2
    assert result["loss"] == pytest.approx(expected, abs=HAND_TOLERANCE)
    value_only = loss_and_statistics(ValueLoss(clip=0.2), FixedOutput(NEW, VALUES))
    assert value_only["loss"] == pytest.approx(value, abs=HAND_TOLERANCE)


def test_an_unclipped_value_loss_is_half_the_square() -> None:
    """The clip fraction is 0."""
    errors, clipped_mask = value_loss(
        torch.tensor([[3.0]]), torch.tensor([[0.0]]), torch.ones(1, 1), None
    )
    assert float(errors) == 2.0
    assert not clipped_mask.any()


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token", (-2.4 + 0.8 + 3.3) / 3),
        ("sequence", ((-2.4 + 0.8) / 2 + 3.3) / 2),
        ("constant", (-2.4 + 0.8 + 3.3) / (2 * 4)),
    ],
)
def test_grpo_supports_all_aggregations(aggregation: Any, expected: float) -> None:
    """Over tokens, over responses, or over responses times a fixed length."""
    result = loss_and_statistics(
        PolicyLoss(aggregation=aggregation, max_response_tokens=4), FixedOutput(NEW)
    )
    assert result["loss"] == pytest.approx(expected, abs=HAND_TOLERANCE)


def test_grpos_weighted_kl_is_ratio_times_k3() -> None:
    """Ratios to the old policy 1.5, 0.5, 1.1; to the reference 1.5, 0.5, 2."""
    result = loss_and_statistics(PolicyLoss(kl_coeff=1.0), FixedOutput(NEW))
    pairs = ((1.5, 1.5), (0.5, 0.5), (1.1, 2.0))
    expected = sum(r * (1 / w - 1 + LOG(w)) for r, w in pairs) / 3
    assert result["kl_loss"] == pytest.approx(expected, abs=HAND_TOLERANCE)


def test_rloo_uses_one_ratio_per_response() -> None:
    """Ratios 0.75 and 1.1 of responses with advantages 0.5 (its mean) and -3; none is clipped."""
    result = loss_and_statistics(
        PolicyLoss(clip_low=0.3, ratio=per_response, aggregation="sequence"), FixedOutput(NEW)
    )
    assert result["loss"] == pytest.approx((-0.75 * 0.5 + 1.1 * 3) / 2, abs=HAND_TOLERANCE)


def terms(ratios: Tensor, advantages: Tensor, **options: Any) -> Terms:
    """Build a surrogate's terms from ratios; log-probabilities are log(ratio / 2)."""
    return Terms(
        log_ratios=ratios.log(),
        logprobs=(ratios / 2).log(),
        advantages=advantages,
        clip_low=0.2,
        clip_high=0.2,
        options=SurrogateOptions(**options),
    )


RATIOS = (1.5, 0.5, 1.1)
"""Ratios of the tokens of `NEW`; advantages 2, -1 and -3. The first two are one response."""
SEQUENCE = math.sqrt(1.5 * 0.5)
"""Geometric mean of the first response's ratios."""


def gate(ratio: float, temperature: float) -> float:
    """Compute SAPO's weight of an advantage."""
    return 4 / temperature / (1 + math.exp(-temperature * (ratio - 1)))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"loss_type": "grpo"}, ((-2.4 + 0.8) / 2 + 3.3) / 2),
        ({"loss_type": "dapo"}, (-2.4 + 0.8 + 3.3) / 3),
        ({"loss_type": "dr_grpo"}, (-2.4 + 0.8 + 3.3) / (2 * 4)),
        ({"loss_type": "luspo"}, (-2.4 + 0.8 + 3.3) / 2),
        (
            {"loss_type": "cispo"},
            -(1.2 * 2 * LOG(0.75) - 0.5 * LOG(0.1) - 1.1 * 3 * LOG(0.44)) / 3,
        ),
        (
            {"loss_type": "sapo"},
            ((-2 * gate(1.5, 1.0) + gate(0.5, 1.05)) / 2 + 3 * gate(1.1, 1.05)) / 2,
        ),
        ({"loss_type": "dapo", "dual_clip": 1.05}, (-2.4 + 0.8 + 3 * 1.05) / 3),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            ((-2 * SEQUENCE + SEQUENCE) / 2 + 3.3) / 2,
        ),
    ],
    ids=str,
)
def test_losses_of_the_grpo_family_match_hand_computed_values(
    options: dict[str, Any], expected: float
) -> None:
    """Computed from the formulas of the papers; ratios are clipped to 0.8 and 1.2."""
    loss = policy_loss(**options)
    assert loss_and_statistics(loss, FixedOutput(NEW))["loss"] == pytest.approx(expected, abs=1e-5)


def policy_loss(**options: Any) -> PolicyLoss:
    """Build a loss as GRPO's trainer does."""
    settings = SurrogateOptions(**options)
    function, aggregation = LOSS_TYPES[settings.loss_type]

    def ratio(log_ratios: Tensor, mask: Tensor) -> Tensor:
        return at_level(log_ratios, mask, settings.importance_sampling_level)

    return PolicyLoss(
        function=function,
        aggregation=aggregation,
        options=settings,
        ratio=ratio,
        max_response_tokens=4,
    )


def test_the_two_sided_clip_bounds_large_ratios_of_negative_advantages() -> None:
    """Ratio 3, A = -1, delta 2: the loss is 2 instead of 3 and has no gradient."""
    ratios = torch.tensor([3.0], requires_grad=True)
    losses, is_clipped = clipped(terms(ratios, torch.tensor([-1.0]), delta=2.0))
    losses.sum().backward()
    assert losses.item() == 2.0
    assert ratios.grad is not None
    assert ratios.grad.item() == 0.0
    assert is_clipped.item()


def test_gspo_token_form_equals_its_sequence_form() -> None:
    """With equal advantages in a response, gradients are equal too (section 4.3 of the paper)."""
    mask = torch.tensor([[True, True, False]])
    gradients = []
    for level in LEVELS[1:]:
        log_ratios = torch.tensor([[0.1, -0.05, 0.0]], requires_grad=True)
        losses, _ = clipped(
            Terms(
                log_ratios=at_level(log_ratios, mask, level),
                logprobs=log_ratios,
                advantages=torch.full((1, 3), 2.0),
                clip_low=0.2,
                clip_high=0.2,
                options=SurrogateOptions(),
            )
        )
        value = (losses * mask).sum() / 2
        assert value.item() == pytest.approx(-2 * math.exp(0.025), abs=1e-6)
        value.backward()
        gradients.append(log_ratios.grad)
    assert torch.allclose(gradients[0], gradients[1], atol=1e-7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "gropo"}, "did you mean 'grpo'"),
        ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, "must be 'token' for"),
        ({"loss_type": "sapo", "delta": 2.0}, "delta cannot be used with sapo"),
        ({"dual_clip": 0.5}, "dual_clip must be a number of at least 1"),
    ],
)
def test_incompatible_loss_options_are_refused(options: dict[str, Any], message: str) -> None:
    """One line says what to change."""
    with pytest.raises(ConfigError, match=message):
        SurrogateOptions(**options)


def test_clipping_removes_the_gradient_only_beyond_the_range() -> None:
    """Ratio 1.5: no gradient for a positive advantage, the full one for a negative advantage."""
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5], requires_grad=True)
    losses, is_clipped = clipped(terms(ratios, torch.tensor([1.0, -1.0, 1.0, -1.0])))
    losses.sum().backward()
    assert ratios.grad is not None
    assert ratios.grad.tolist() == [0.0, 1.0, -1.0, 0.0]
    assert is_clipped.tolist() == [True, False, False, True]
    with pytest.raises(ConfigError, match="'row'"):
        loss_divisor(torch.ones(1, 1), "row", None)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_statistics_equal_the_plain_formulas(temperature: float) -> None:
    """Losses, entropies and gradients over several chunks match float64 within 1e-5."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(700, 1031, generator=generator).mul_(3).requires_grad_()
    targets = torch.randint(1031, (700,), generator=generator)
    scale = torch.randn(700, generator=generator)
    losses, entropies = losses_and_entropies(logits, targets, temperature)
    (gradient,) = torch.autograd.grad((losses * scale).sum(), logits)
    logits64 = logits.detach().double().requires_grad_()
    table = (logits64 / temperature).log_softmax(-1)
    expected = -table.gather(1, targets[:, None])[:, 0]
    (expected_gradient,) = torch.autograd.grad((expected * scale).sum(), logits64)
    # Float32 resolves a loss of up to 30 nats to 4e-6 at best.
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(
        entropies.double(), -(table.exp() * table).sum(1), rtol=1e-6, atol=1e-5
    )
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("saved_logits_bytes", [1 << 30, 0])
def test_statistics_from_hidden_states_equal_the_plain_formulas(
    saved_logits_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of losses and entropies, with logits saved or recomputed.

    A second call while the first graph is alive gets its own memory.
    """
    monkeypatch.setattr(token_statistics, "SAVED_LOGITS_BYTES", saved_logits_bytes)
    monkeypatch.setattr(token_statistics, "PRODUCT_BYTES", 1 << 18)
    monkeypatch.setattr(token_statistics, "CHUNK_BYTES", 1 << 16)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 16, generator=generator).requires_grad_()
    weight = torch.randn(515, 16, generator=generator).requires_grad_()
    targets = torch.randint(515, (300,), generator=generator)
    scales = torch.randn(2, 300, generator=generator)
    scratch, actual, expected = Scratch(), [], []
    statistics = [
        projected_losses_and_entropies(hidden, weight, targets, t, scratch) for t in (1.0, 0.7)
    ]
    for pair in statistics:
        for terms in (scales * torch.stack(pair), scales[:1] * pair[0], scales[1:] * pair[1]):
            gradients = torch.autograd.grad(terms.sum(), (hidden, weight), retain_graph=True)
            actual += [*pair, *gradients]
    inputs64 = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    for temperature in (1.0, 0.7):
        table = (inputs64[0] @ inputs64[1].T / temperature).log_softmax(1)
        pair = (-table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(1))
        for terms in (scales * torch.stack(pair), scales[:1] * pair[0], scales[1:] * pair[1]):
            gradients = torch.autograd.grad(terms.sum(), inputs64, retain_graph=True)
            expected += [*pair, *gradients]
    # Sums of 300 terms of order 10 in float32, each rounded by 6e-8 of its size.
    for value, expected_value in zip(actual, expected, strict=True):
        torch.testing.assert_close(value.double(), expected_value, rtol=1e-5, atol=2e-4)
