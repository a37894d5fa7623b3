"""Rewards: callables, modules, sums, and failures."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor, nn

from ms_align import ConfigError, RewardError, Sample
from ms_align.rewards.scoring import ModuleReward, rewards_of, score

SAMPLES = [
    Sample(
        prompt=f"p{index}",
        response="r" * (index + 1),
        prompt_tokens=(1, 2),
        response_tokens=tuple(range(3, 4 + index)),
    )
    for index in range(4)
]


def lengths(samples: Sequence[Sample]) -> list[float]:
    """Return the number of characters of each response."""
    return [float(len(sample.response)) for sample in samples]


class LastToken(nn.Module):
    """Module whose score of each token is its id, (B, S)."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) to the same."""
        return tokens.float()


class Classifier(nn.Module):
    """Module with `logits` (B, 1): the number of tokens in the mask."""

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Any:
        """An object with logits (B, 1)."""
        return SimpleNamespace(logits=attention_mask.sum(1, keepdim=True).float())


def test_callables_and_modules_are_rewards_and_add_up() -> None:
    """With names and weights; the parts are reported."""
    scores = score(rewards_of({"long": (lengths, 2.0), "last": LastToken()}), SAMPLES)
    assert scores.parts["long"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert scores.parts["last"].tolist() == [3.0, 4.0, 5.0, 6.0]
    assert scores.total.tolist() == [5.0, 8.0, 11.0, 14.0]
    assert score(rewards_of([lengths, lengths]), SAMPLES).total.tolist() == [2.0, 4.0, 6.0, 8.0]


def test_a_classifier_gets_an_attention_mask() -> None:
    """Two prompt tokens and one to four of the response, in batches of any size."""
    assert ModuleReward(Classifier(), batch_size=3)(SAMPLES).tolist() == [3.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize("pad", [None, 0, 2])
def test_a_transformers_classifier_gives_the_same_scores_in_batches(pad: int | None) -> None:
    """It scores the last non-padding token; without a padding token, rows are scored singly."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **sizes, vocab_size=64, intermediate_size=64, num_labels=1, pad_token_id=pad
    )
    reward = ModuleReward(LlamaForSequenceClassification(config))
    samples = [evolve(sample, prompt_tokens=(7, 8)) for sample in SAMPLES]
    single = torch.cat([reward([sample]) for sample in samples])
    assert len(set(single.tolist())) == len(samples)
    torch.testing.assert_close(reward(samples), single, rtol=0, atol=1e-5)


class Counts(nn.Module):
    """Module with a local variable named like an optional argument."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) to (B,)."""
        lengths = (tokens != 0).sum(1)
        return lengths.float()


def test_modules_get_only_the_arguments_of_their_forward() -> None:
    """Local variables of forward are not arguments."""
    assert ModuleReward(Counts())(SAMPLES).tolist() == [3.0, 4.0, 5.0, 6.0]


def raise_on_the_third(samples: Sequence[Sample]) -> list[float]:
    """Raise on sample p2."""
    if any(sample.prompt == "p2" for sample in samples):
        raise KeyError("no such thing")
    return lengths(samples)


def nan_on_the_third(samples: Sequence[Sample]) -> list[float]:
    """Return NaN for sample p2."""
    return [float("nan") if s.prompt == "p2" else len(s.response) for s in samples]


@pytest.mark.parametrize("reward", [raise_on_the_third, nan_on_the_third])
def test_a_failure_names_its_sample_and_stops_skips_or_penalizes(reward: Any) -> None:
    """The other samples keep their rewards."""
    named = rewards_of(reward)
    with pytest.raises(RewardError, match=r"on sample 2: prompt 'p2', response 'rrr'"):
        score(named, SAMPLES)
    skipped = score(named, SAMPLES, on_failure="skip")
    assert skipped.total[2].isnan()
    assert skipped.total[[0, 1, 3]].tolist() == [1.0, 2.0, 4.0]
    assert len(skipped.failures) == 1
    penalized = score(named, SAMPLES, on_failure="penalize", penalty=-7.0)
    assert penalized.total.tolist() == [1.0, 2.0, -7.0, 4.0]


def test_a_wrong_number_of_rewards_is_rejected() -> None:
    """For every `on_failure`, as no sample can be named."""
    with pytest.raises(RewardError, match=r"shape \(1,\) for 4 samples"):
        score(rewards_of(lambda samples: [1.0]), SAMPLES, on_failure="skip")
    for rewards in (None, "good", [1.0, None, 2.0, 3.0], ["1", "2", "3", "4"]):
        with pytest.raises(RewardError, match=r"one number per sample, got .* for 4 samples"):
            score(rewards_of(lambda samples, rewards=rewards: rewards), SAMPLES, on_failure="skip")
    with pytest.raises(ConfigError, match="got int"):
        rewards_of({"three": 3})
    with pytest.raises(ConfigError, match="has no rewards"):
        rewards_of([])
