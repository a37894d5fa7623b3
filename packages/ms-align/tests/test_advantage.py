"""Advantages compared with hand-computed values and with loops over their definitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ms_align import gae
from ms_align.losses.advantage import group_relative, has_baseline, leave_one_out, whiten

EXACT = {"rtol": 1e-12, "atol": 1e-12}
"""float64: a few dozen roundings of 1e-16 each."""


def by_definition(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> list[float]:
    """Compute each advantage as the double sum of discounted temporal differences."""
    next_values = [*values, 0.0][1:]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, next_values, values, strict=True)]
    return [
        sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]


def test_gae_matches_hand_computed_values() -> None:
    """Four steps, computed by hand to six decimals."""
    advantages = gae(
        torch.tensor([[-0.1, -0.05, 0.02, 1.0]]),
        torch.tensor([[0.5, 0.4, 0.6, 0.8]]),
        torch.ones(1, 4),
        gamma=0.99,
        lam=0.95,
    )
    expected = torch.tensor([[0.285337, 0.520294, 0.400100, 0.2]])
    torch.testing.assert_close(advantages, expected, rtol=0, atol=5e-7)  # half of the last decimal


@given(st.data())
def test_padding_does_not_change_gae(data: st.DataObject) -> None:
    """Padding on the left, on the right and between tokens."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    length = data.draw(st.integers(1, 12))
    gamma, lam = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))
    rewards, values = torch.randn(2, 3, length, generator=generator).double()
    mask = torch.rand(3, length, generator=generator) < 0.6
    advantages = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(3):
        unmasked = mask[row]
        expected = by_definition(
            rewards[row][unmasked].tolist(), values[row][unmasked].tolist(), gamma, lam
        )
        expected_tensor = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(advantages[row][unmasked], expected_tensor, **EXACT)
        assert not advantages[row][~unmasked].any()


def test_gae_rejects_different_shapes() -> None:
    """The message lists the shapes."""
    with pytest.raises(ValueError, match=r"\(2, 3\), values \(2, 2\)"):
        gae(torch.zeros(2, 3), torch.zeros(2, 2), torch.ones(2, 3))


def test_whitening_normalizes_the_unmasked_elements() -> None:
    """Masked elements do not influence the result and are 0."""
    x = torch.tensor([[1.0, 2.0, 9e9], [3.0, 6.0, -9e9]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    whitened = whiten(x, mask, epsilon=0.0)
    unmasked = whitened[mask.bool()]
    assert abs(float(unmasked.mean())) < 1e-12
    assert abs(float(unmasked.var()) - 1) < 1e-12
    assert not whitened[~mask.bool()].any()
    unshifted = whiten(x, mask, shift_mean=False, epsilon=0.0)[mask.bool()]
    assert abs(float(unshifted.mean()) - 3.0) < 1e-12


def test_group_advantages_follow_their_definitions() -> None:
    """Rewards (1, 0, 0, 1) and (2, 2, 2, 2): equal rewards give 0."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0], dtype=torch.float64)
    deviation = (1 / 3) ** 0.5  # of (1, 0, 0, 1), with n - 1
    advantages = group_relative(rewards, 4, epsilon=0.0)[:4]
    expected = torch.tensor([0.5, -0.5, -0.5, 0.5], dtype=torch.float64) / deviation
    torch.testing.assert_close(advantages, expected, **EXACT)
    assert not group_relative(rewards, 4)[4:].any()
    plain = group_relative(rewards, 4, scale="none")[:4]
    torch.testing.assert_close(plain, expected * deviation, **EXACT)
    rloo_advantages = leave_one_out(rewards, 4)[:4]
    torch.testing.assert_close(rloo_advantages, expected * deviation * 4 / 3, **EXACT)
    with pytest.raises(ValueError, match="num_generations 3"):
        leave_one_out(rewards, 3)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_skipped_response_does_not_count_in_its_group(scale: str) -> None:
    """The group becomes smaller; a single response has no baseline."""
    nan = float("nan")
    rewards = torch.tensor([1.0, nan, 0.0, nan, 0.5, nan, nan, nan], dtype=torch.float64)
    remaining = torch.tensor([1.0, 0.0], dtype=torch.float64)
    advantages = leave_one_out(rewards, 4)
    torch.testing.assert_close(advantages[[0, 2]], leave_one_out(remaining, 2), **EXACT)
    assert not advantages[[1, 3, 4, 5, 6, 7]].any()
    assert has_baseline(rewards, 4).tolist() == [True, False, True] + 5 * [False]
    advantages = group_relative(rewards, 4, scale=scale)
    divisors = {
        "group": remaining.std() + 1e-4,
        "batch": rewards[[0, 2, 4]].std() + 1e-4,
        "none": 1.0,
    }
    torch.testing.assert_close(advantages[[0, 2]], (remaining - 0.5) / divisors[scale], **EXACT)
    assert not advantages[[1, 3, 4, 5, 6, 7]].any()


def test_maxrl_divides_by_the_mean_of_the_group() -> None:
    """Rewards 1, 0, 0, 0 have mean 1/4: advantages 3, -1, -1, -1. Groups without reward give 0."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    advantages = group_relative(rewards, 4, scale="mean")
    assert advantages.tolist() == [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
