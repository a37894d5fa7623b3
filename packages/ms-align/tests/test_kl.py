"""KL estimators: values worked by hand, and expected gradients against the exact one.

Enumeration: every response of two tokens over a vocabulary of three, from a policy that is a table
of logits for each prefix. Expectations are sums over all nine, in float64, with no chance at all.
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
    """Logits (4, 3): at the start, and after each first token."""
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(1 + VOCABULARY, VOCABULARY, generator=chance).double()


REFERENCE, OLD = table(1), table(2)


def logprobs(logits: Tensor) -> Tensor:
    """Return the log-probability of each token of each response, (9, 2)."""
    scores = logits.log_softmax(-1)
    first, second = RESPONSES.unbind(1)
    return torch.stack((scores[0, first], scores[1 + first, second]), 1)


def gradient(of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient of a scalar with respect to the policy's logits."""
    policy = table(0).requires_grad_()
    (found,) = torch.autograd.grad(of(policy), policy)
    return found


def objective(policy: Tensor, rewards: Tensor) -> Tensor:
    """-(E[reward] - β·KL(policy ‖ reference)) over whole responses, differentiated exactly."""
    each = logprobs(policy)
    chance = each.sum(1).exp()
    divergence = (chance * (each - logprobs(REFERENCE)).sum(1)).sum()
    return -((chance * rewards).sum() - BETA * divergence)


def expected(estimator: str, place: str, drawn_by: Tensor, rewards: Tensor) -> Tensor:
    """Return the expected gradient of a trainer's loss over responses sampled by `drawn_by`."""

    def loss(policy: Tensor) -> Tensor:
        each, reference = logprobs(policy), logprobs(REFERENCE)
        old = logprobs(drawn_by).detach()
        chance = old.sum(1).exp()
        score = torch.zeros(len(RESPONSES), LENGTH).double()
        score[:, -1] = rewards
        mask = torch.ones(len(RESPONSES), LENGTH, dtype=torch.bool)
        penalty = torch.zeros(()).double()
        if place == "reward":
            score = score - BETA * estimate(old, reference, estimator)
        else:
            terms = loss_term(each, reference, old, mask, estimator)
            penalty = BETA * (chance * terms.sum(1)).sum()
        to_go = score.flip(1).cumsum(1).flip(1)  # the return of each token, with no baseline
        ratios = (each - old).exp()
        return -(chance[:, None] * ratios * to_go).sum() + penalty

    return gradient(loss)


def bias(estimator: str, place: str, *, off_policy: bool = False) -> float:
    """Return the relative error of the expected gradient of the KL term."""
    drawn_by, nothing = OLD if off_policy else table(0), torch.zeros_like(REWARDS)
    exact = gradient(lambda policy: objective(policy, nothing))
    return float((expected(estimator, place, drawn_by, nothing) - exact).norm() / exact.norm())


@pytest.mark.parametrize(("estimator", "place"), [("k1", "reward"), ("k1_to_go", "loss")])
def test_k1_to_go_gives_the_exact_gradient_of_the_response_kl(estimator: str, place: str) -> None:
    """On the policy's own responses, in the reward or in the loss; also with a reward."""
    assert bias(estimator, place) < EXACT
    exact = gradient(lambda policy: objective(policy, REWARDS))
    found = expected(estimator, place, table(0), REWARDS)
    torch.testing.assert_close(found, exact, rtol=0, atol=EXACT)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_other_estimators_in_the_reward_are_biased(estimator: str) -> None:
    """By more than a tenth of the gradient of the KL."""
    assert bias(estimator, "reward") > 0.1


def first_token_bias(estimator: str, drawn_by: Tensor) -> float:
    """Return the bias for responses of one token, where the token's KL is the response's."""

    def exact(policy: Tensor) -> Tensor:
        scores, reference = policy[0].log_softmax(-1), REFERENCE[0].log_softmax(-1)
        return (scores.exp() * (scores - reference)).sum()

    def loss(policy: Tensor) -> Tensor:
        scores, reference = policy[0].log_softmax(-1), REFERENCE[0].log_softmax(-1)
        old = drawn_by[0].log_softmax(-1)
        mask = torch.ones(VOCABULARY, 1, dtype=torch.bool)
        terms = loss_term(scores[:, None], reference[:, None], old[:, None], mask, estimator)
        return (old.exp() * terms[:, 0]).sum()

    error = gradient(loss) - gradient(exact)
    return float(error.norm() / gradient(exact).norm())


def test_biases_of_token_kl_estimators_in_the_loss() -> None:
    """k2 is exact on the policy's own tokens, k3 is not, weighted k3 is exact on any."""
    own = table(0)
    assert first_token_bias("k2", own) < EXACT
    assert first_token_bias("k3", own) > 0.1
    assert first_token_bias("k2", OLD) > 0.1
    assert first_token_bias("k3", OLD) > 0.1
    assert first_token_bias("k3_weighted", own) < EXACT
    assert first_token_bias("k3_weighted", OLD) < EXACT


def test_k3_in_the_loss_has_the_gradient_of_the_reverse_kl() -> None:
    """Its expected gradient is that of KL(reference ‖ policy)."""

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
    one = torch.zeros(1, 1)
    with pytest.raises(ConfigError, match="gradient of 0"):
        loss_term(one, one, one, torch.ones(1, 1), "k1")


def test_the_biases_in_the_guide_are_the_measured_ones() -> None:
    """Every number on the page, to its two decimals."""
    text = (Path(__file__).parents[3] / "docs" / "align" / "kl.md").read_text()
    for place, estimator in (
        ("reward", "k1"),
        ("reward", "k2"),
        ("reward", "k3"),
        ("loss", "k2"),
        ("loss", "k3"),
        ("loss", "k3_weighted"),
        ("loss", "k1_to_go"),
    ):
        own, other = bias(estimator, place), bias(estimator, place, off_policy=True)
        assert f"| `{estimator}` | {place} | {own:.2f} | {other:.2f} |" in text


def test_estimators_give_the_values_worked_by_hand() -> None:
    """A log-ratio of log 2: k1 = 0.6931, k2 = 0.2402, k3 = 1/2 - 1 + 0.6931."""
    policy, reference = torch.tensor([[0.0]]), torch.tensor([[-0.693147]])
    assert float(estimate(policy, reference, "k1")) == pytest.approx(0.693147, abs=1e-6)
    assert float(estimate(policy, reference, "k2")) == pytest.approx(0.240227, abs=1e-6)
    assert float(estimate(policy, reference, "k3")) == pytest.approx(0.193147, abs=1e-6)
    with pytest.raises(ConfigError, match="'k4'"):
        estimate(policy, reference, "k4")


def test_the_adaptive_controller_gives_the_values_worked_by_hand() -> None:
    """An error of 0.5 is clipped to 0.2; one of -0.05 is not."""
    controller = AdaptiveKL(target=6.0, horizon=10_000)
    assert controller.next(0.2, 9.0, 256) == pytest.approx(0.2 * (1 + 0.2 * 0.0256))
    assert controller.next(0.2, 5.7, 256) == pytest.approx(0.2 * (1 - 0.05 * 0.0256))
    with pytest.raises(ConfigError, match="kl_target must be above 0"):
        AdaptiveKL(target=0.0)
