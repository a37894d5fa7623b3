"""How the next token is chosen: cut as asked for, and as often as its probability says."""

from collections import Counter

import pytest
import torch

from ms_parallel.engine.generation import Sampling, sample_tokens
from ms_parallel.errors import ConfigError

PROBABILITIES = torch.tensor([0.15, 0.5, 0.05, 0.3], dtype=torch.float64)
DRAWS = 4000


def drawn(sampling: Sampling) -> dict[int, float]:
    """How often each token was chosen, as a share."""
    logits = PROBABILITIES.log().expand(DRAWS, 4)
    counts = Counter(sample_tokens(logits, sampling, 0).tolist())
    return {token: count / DRAWS for token, count in sorted(counts.items())}


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({}, (0, 1, 2, 3)),
        ({"top_k": 3}, (0, 1, 3)),
        ({"top_p": 0.79}, (1, 3)),
        ({"top_p": 0.81}, (0, 1, 3)),
        ({"top_p": 1e-6}, (1,)),
        ({"min_p": 0.29}, (0, 1, 3)),
        ({"min_p": 0.31}, (1, 3)),
        # Of the two that are left the likelier has 0.625, so that the other has 0.6 of it.
        ({"top_k": 2, "min_p": 0.61}, (1,)),
        ({"temperature": 0.0, "min_p": 0.0}, (1,)),
    ],
)
def test_only_what_a_cut_leaves_is_drawn_and_as_often_as_it_says(cut, kept):
    """Shares lie within four standard errors of the probabilities that are left."""
    found = drawn(Sampling(**cut))
    assert tuple(found) == kept
    left = PROBABILITIES[list(kept)] / PROBABILITIES[list(kept)].sum()
    for share, truth in zip(found.values(), left.tolist(), strict=True):
        assert abs(share - truth) <= 4 * (truth * (1 - truth) / DRAWS) ** 0.5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"top_p": 0.0}, "top_p must be a number of at least 1e-30 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p must be a number of at least 1e-30 and at most 1, got 1.5"),
        ({"min_p": -0.1}, "min_p must be a number of at least 0 and at most 1, got -0.1"),
        ({"min_p": float("nan")}, "min_p must be a number of at least 0 and at most 1, got nan"),
        ({"top_k": 0}, "at least 1"),
        ({"temperature": -1.0}, "temperature must be a number of at least 0, got -1.0"),
    ],
)
def test_a_cut_that_makes_no_sense_is_refused(settings, words):
    """The value and what would fit are named."""
    with pytest.raises(ConfigError) as refusal:
        Sampling(**settings)
    assert words in str(refusal.value)


def test_seeds_of_every_size_draw_apart():
    """Also those that differ in their highest bits alone: torch's generator takes the lowest."""
    logits = PROBABILITIES.log().expand(200, 4)
    seeds = (0, 1, 1 << 31, 1 << 40, (1 << 64) + 1, -1)
    drawn_by = {tuple(sample_tokens(logits, Sampling(seed=seed), 0).tolist()) for seed in seeds}
    assert len(drawn_by) == len(seeds)
