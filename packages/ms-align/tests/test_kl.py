"""KL estimators: hand-computed values, and expected gradients compared with the exact one.

Enumerates every response of two tokens over a vocabulary of three, for a policy given by a table of
logits per prefix. Expectations are sums over all nine in float64, without sampling.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ms_align import ConfigError
from ms_align.losses.adaptive_kl import AdaptiveKL
from ms_align.losses.kl import estimate, loss_term

VOCABULARY, LENGTH = 3, 2
RESPONSES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
REWARDS = torch.tensor([0.3, -1.0, 2.0, 0.1, 0.7, -0.4, 1.5, 0.0, -2.0], dtype=torch.float64)
BETA = 0.7
EXACT = 1e-12
"""float64: sums of nine terms."""


def table(seed: int) -> Tensor:
    """Return logits (4, 3): at the start, and after each first token."""
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(1 + VOCABULARY, VOCABULARY, generator=chance).double()


REFERENCE, OLD = table(1), table(2)


def logprobs(logits: Tensor) -> Tensor:
    """Return the log-probability of each token of each response, (9, 2)."""
    scores = logits.log_softmax(-1)
    first, second = RESPONSES.unbind(1)
    return torch.stack((scores[0, first], scores[1 + first, second]), 1)


def gradient(objective_function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient of a scalar with respect to the policy's logits."""
    policy = table(0).requires_grad_()
    (result,) = torch.autograd.grad(objective_function(policy), policy)
    return result


def objective(policy: Tensor, rewards: Tensor) -> Tensor:
    """Return -(E[reward] - β·KL(policy ‖ reference)) over complete responses, exactly."""
    policy_logprobs = logprobs(policy)
    probability = policy_logprobs.sum(1).exp()
    divergence = (probability * (policy_logprobs - logprobs(REFERENCE)).sum(1)).sum()
    return -((probability * rewards).sum() - BETA * divergence)


def expected(estimator: str, location: str, behavior: Tensor, rewards: Tensor) -> Tensor:
    """Return the expected gradient of a trainer's loss over responses sampled from `drawn_by`."""

    def loss(policy: Tensor) -> Tensor:
        policy_logprobs, reference = logprobs(policy), logprobs(REFERENCE)
        old = logprobs(behavior).detach()
        probability = old.sum(1).exp()
        score = torch.zeros(len(RESPONSES), LENGTH).double()
        score[:, -1] = rewards
        mask = torch.ones(len(RESPONSES), LENGTH, dtype=torch.bool)
        penalty = torch.zeros(()).double()
        if location == "reward":
            score = score - BETA * estimate(old, reference, estimator)
        else:
            terms = loss_term(policy_logprobs, reference, old, mask, estimator)
            penalty = BETA * (probability * terms.sum(1)).sum()
        returns = score.flip(1).cumsum(1).flip(1)  # return of each token, without a baseline
        ratios = (policy_logprobs - old).exp()
        return -(probability[:, None] * ratios * returns).sum() + penalty

    return gradient(loss)


def bias(estimator: str, location: str, *, off_policy: bool = False) -> float:
    """Return the relative error of the expected gradient of the KL term."""
    behavior, zero_rewards = OLD if off_policy else table(0), torch.zeros_like(REWARDS)
    exact = gradient(lambda policy: objective(policy, zero_rewards))
    return float(
        (expected(estimator, location, behavior, zero_rewards) - exact).norm() / exact.norm()
    )


@pytest.mark.parametrize(("estimator", "location"), [("k1", "reward"), ("k1_to_go", "loss")])
def test_k1_to_go_gives_the_exact_gradient_of_the_response_kl(
    estimator: str, location: str
) -> None:
    """On the policy's own responses, as reward or as loss term; also with a reward."""
    assert bias(estimator, location) < EXACT
    exact = gradient(lambda policy: objective(policy, REWARDS))
    actual = expected(estimator, location, table(0), REWARDS)
    torch.testing.assert_close(actual, exact, rtol=0, atol=EXACT)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_other_estimators_in_the_reward_are_biased(estimator: str) -> None:
    """By more than a tenth of the gradient of the KL."""
    assert bias(estimator, "reward") > 0.1


def first_token_bias(estimator: str, behavior: Tensor) -> float:
    """Return the bias for responses of one token, where token and response KL are equal."""

    def exact(policy: Tensor) -> Tensor:
        scores, reference = policy[0].log_softmax(-1), REFERENCE[0].log_softmax(-1)
        return (scores.exp() * (scores - reference)).sum()

    def loss(policy: Tensor) -> Tensor:
        scores, reference = policy[0].log_softmax(-1), REFERENCE[0].log_softmax(-1)
        old = behavior[0].log_softmax(-1)
        mask = torch.ones(VOCABULARY, 1, dtype=torch.bool)
        terms = loss_term(scores[:, None], reference[:, None], old[:, None], mask, estimator)
        return (old.exp() * terms[:, 0]).sum()

    error = gradient(loss) - gradient(exact)
    return float(error.norm() / gradient(exact).norm())


def test_biases_of_token_kl_estimators_in_the_loss() -> None:
    """On the policy's own tokens k2 is exact and k3 is not; weighted k3 is exact on any tokens."""
    on_policy = table(0)
    assert first_token_bias("k2", on_policy) < EXACT
    assert first_token_bias("k3", on_policy) > 0.1
    assert first_token_bias("k2", OLD) > 0.1
    assert first_token_bias("k3", OLD) > 0.1
    assert first_token_bias("k3_weighted", on_policy) < EXACT
    assert first_token_bias("k3_weighted", OLD) < EXACT


def test_k3_in_the_loss_has_the_gradient_of_the_reverse_kl() -> None:
    """Its expected gradient equals the gradient of KL(reference ‖ policy)."""

    def reverse(policy: Tensor) -> Tensor:
        scores, reference = policy[0].log_softmax(-1), REFERENCE[0].log_softmax(-1)
        return (reference.exp() * (reference - scores)).sum()

    def loss(policy: Tensor) -> Tensor:
        scores, reference = policy[0].log_softmax(-1), REFERENCE[0].log_softmax(-1)
        terms = estimate(scores, reference, "k3")
        return (scores.detach().exp() * terms).sum()

    torch.testing.assert_close(gradient(loss), gradient(reverse), rtol=0, atol=EXACT)


def test_k1_in_the_loss_is_rejected() -> None:
    """Its expected gradient is 0 for every reference."""

    def loss(policy: Tensor) -> Tensor:
        scores, reference = policy[0].log_softmax(-1), REFERENCE[0].log_softmax(-1)
        return (scores.detach().exp() * estimate(scores, reference, "k1")).sum()

    assert float(gradient(loss).norm()) < EXACT
    zeros = torch.zeros(1, 1)
    with pytest.raises(ConfigError, match="gradient of 0"):
        loss_term(zeros, zeros, zeros, torch.ones(1, 1), "k1")


def test_the_biases_in_the_guide_equal_the_measured_ones() -> None:
    """Every number on the page, to two decimals."""
    text = (Path(__file__).parents[3] / "docs" / "align" / "kl.md").read_text()
    for location, estimator in (
        ("reward", "k1"),
        ("reward", "k2"),
        ("reward", "k3"),
        ("loss", "k2"),
        ("loss", "k3"),
        ("loss", "k3_weighted"),
        ("loss", "k1_to_go"),
    ):
        on_policy, off_policy = (
            bias(estimator, location),
            bias(estimator, location, off_policy=True),
        )
        assert f"| `{estimator}` | {location} | {on_policy:.2f} | {off_policy:.2f} |" in text


def test_estimators_match_hand_computed_values() -> None:
    """A log-ratio of log 2: k1 = 0.6931, k2 = 0.2402, k3 = 1/2 - 1 + 0.6931."""
    policy, reference = torch.tensor([[0.0]]), torch.tensor([[-0.693147]])
    assert float(estimate(policy, reference, "k1")) == pytest.approx(0.693147, abs=1e-6)
    assert float(estimate(policy, reference, "k2")) == pytest.approx(0.240227, abs=1e-6)
    assert float(estimate(policy, reference, "k3")) == pytest.approx(0.193147, abs=1e-6)
    with pytest.raises(ConfigError, match="'k4'"):
        estimate(policy, reference, "k4")


def test_the_adaptive_controller_matches_hand_computed_values() -> None:
    """An error of 0.5 is clipped to 0.2; -0.05 is not clipped."""
    controller = AdaptiveKL(target=6.0, horizon=10_000)
    assert controller.next(0.2, 9.0, 256) == pytest.approx(0.2 * (1 + 0.2 * 0.0256))
    assert controller.next(0.2, 5.7, 256) == pytest.approx(0.2 * (1 - 0.05 * 0.0256))
    with pytest.raises(ConfigError, match="kl_target must be above 0"):
        AdaptiveKL(target=0.0)
