"""Sampling of the next token: cuts, and frequencies that match the probabilities."""

from collections import Counter

import pytest
import torch

from ms_parallel.engine.generation import Sampling, sample_tokens
from ms_parallel.errors import ConfigError

PROBABILITIES = torch.tensor([0.15, 0.5, 0.05, 0.3], dtype=torch.float64)
DRAWS = 4000


def sampled_frequencies(sampling: Sampling) -> dict[int, float]:
    """Relative frequency of each sampled token."""
    logits = PROBABILITIES.log().expand(DRAWS, 4)
    counts = Counter(sample_tokens(logits, sampling, 0).tolist())
    return {token: count / DRAWS for token, count in sorted(counts.items())}


@pytest.mark.parametrize(
    ("cut", "tokens"),
    [
        ({}, (0, 1, 2, 3)),
        ({"top_k": 3}, (0, 1, 3)),
        ({"top_p": 0.79}, (1, 3)),
        ({"top_p": 0.81}, (0, 1, 3)),
        ({"top_p": 1e-6}, (1,)),
        ({"min_p": 0.29}, (0, 1, 3)),
        ({"min_p": 0.31}, (1, 3)),
        # Of the remaining two, the likelier has 0.625, and the other 0.6 times that.
        ({"top_k": 2, "min_p": 0.61}, (1,)),
        ({"temperature": 0.0, "min_p": 0.0}, (1,)),
    ],
)
def test_only_tokens_within_a_cut_are_sampled_with_their_probabilities(cut, tokens):
    """Shares lie within four standard errors of the probabilities that are left."""
    frequencies = sampled_frequencies(Sampling(**cut))
    assert tuple(frequencies) == tokens
    expected = PROBABILITIES[list(tokens)] / PROBABILITIES[list(tokens)].sum()
    for frequency, p in zip(frequencies.values(), expected.tolist(), strict=True):
        assert abs(frequency - p) <= 4 * (p * (1 - p) / DRAWS) ** 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 0.0}, "top_p must be a number of at least 1e-30 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p must be a number of at least 1e-30 and at most 1, got 1.5"),
        ({"min_p": -0.1}, "min_p must be a number of at least 0 and at most 1, got -0.1"),
        ({"min_p": float("nan")}, "min_p must be a number of at least 0 and at most 1, got nan"),
        ({"top_k": 0}, "at least 1"),
        ({"temperature": -1.0}, "temperature must be a number of at least 0, got -1.0"),
    ],
)
def test_invalid_cuts_are_refused(settings, message):
    """The message has the value and what fits."""
    with pytest.raises(ConfigError) as refusal:
        Sampling(**settings)
    assert message in str(refusal.value)


def test_seeds_of_any_size_give_different_samples():
    """Also seeds that differ only in high bits, which torch's generator ignores."""
    logits = PROBABILITIES.log().expand(200, 4)
    seeds = (0, 1, 1 << 31, 1 << 40, (1 << 64) + 1, -1)
    samples = {tuple(sample_tokens(logits, Sampling(seed=seed), 0).tolist()) for seed in seeds}
    assert len(samples) == len(seeds)
