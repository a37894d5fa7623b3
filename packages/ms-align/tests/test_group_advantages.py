"""REINFORCE++, pass@k and dynamic sampling: formulas, expected gradients, refills and resume."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from ms_align import ConfigError, GRPOTrainer, RLOOTrainer, Sample
from ms_align.losses.advantage import best_of_k, group_relative, leave_one_out, returns_to_go
from ms_align.rollouts.experience import Experience
from ms_align.tokenizer import ByteTokenizer

from .small_models import decoder, vowels

PROMPTS = ["hello", "a", "what is", "xyz", "to be", "or not"]


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=7), st.integers(1, 8))
def test_best_of_k_averages_over_all_sets(rewards: list[int], k: int) -> None:
    """Compare with an enumeration of all sets of k responses; groups smaller than k are one set."""
    values = torch.tensor(rewards, dtype=torch.float64)
    size = min(k, len(rewards))
    expected = []
    for index in range(len(rewards)):
        best = [
            max(rewards[i] for i in subset)
            for subset in itertools.combinations(range(len(rewards)), size)
            if index in subset
        ]
        expected.append(sum(best) / len(best))
    result = best_of_k(values, len(rewards), k)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))


def test_best_of_k_ignores_skipped_responses() -> None:
    """A NaN reward belongs to no set, and an empty group stays empty."""
    nan = float("nan")
    rewards = torch.tensor([1.0, nan, 0.0, 0.0, nan, nan, nan, nan])
    result = best_of_k(rewards, 4, 2)
    # Sets of {1, 0, 0}: the first response is always the best, the others in half of their sets.
    torch.testing.assert_close(result[:4], torch.tensor([1.0, nan, 0.5, 0.5]), equal_nan=True)
    assert result[4:].isnan().all()


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("estimator", [group_relative, leave_one_out])
def test_the_expected_gradient_is_that_of_the_best_of_k(k: int, estimator: Any) -> None:
    """Enumerate all groups of 4 answers among 3, for rewards of 0 and 1 (pass@k) and others.

    The gradient of E[max of k] by its definition, in float64. Subtracting the group's mean scales
    it by (n - k) / k / n per response, the mean of the others by (n - k) / k / (n - 1).
    """
    n = 4
    for rewards in ([0.0, 1.0, 0.0], [0.0, 0.3, 1.0]):
        values = torch.tensor(rewards, dtype=torch.float64)
        logits = torch.tensor([0.2, -0.5, 0.1], dtype=torch.float64, requires_grad=True)
        best = torch.zeros((), dtype=torch.float64)
        for answers in itertools.product(range(3), repeat=k):
            best = best + logits.log_softmax(0)[list(answers)].sum().exp() * max(
                rewards[answer] for answer in answers
            )
        (exact,) = torch.autograd.grad(best, logits)
        expected = torch.zeros(3, dtype=torch.float64)
        for answers in itertools.product(range(3), repeat=n):
            index = torch.tensor(answers)
            scores = best_of_k(values[index], n, k)
            scale = {"scale": "none"} if estimator is group_relative else {}
            advantages = estimator(scores, n, **scale)
            logprobs = logits.log_softmax(0)[index]
            (gradient,) = torch.autograd.grad((advantages * logprobs).mean(), logits)
            expected += logits.log_softmax(0)[index].sum().exp().detach() * gradient
        factor = (n - k) / k / (n if estimator is group_relative else n - 1)
        torch.testing.assert_close(expected, factor * exact, rtol=1e-10, atol=1e-12)
        assert exact.abs().max() > 1e-3


def experience(scores: list[float]) -> Experience:
    """Return responses of 1 to 3 tokens with the given scores."""
    lengths = torch.arange(len(scores)) % 3 + 1
    mask = torch.arange(4) < lengths[:, None]
    generator = torch.Generator().manual_seed(0)
    old, reference = torch.randn(2, len(scores), 4, generator=generator)
    return Experience(
        targets=torch.where(mask, 1, -100),
        old_logprobs=old,
        reference_logprobs=reference,
        values=None,
        scores=torch.tensor(scores),
    )


def trainer(folder: Path, trainer_class: Any = GRPOTrainer, **overrides: Any) -> Any:
    """Build a trainer of a small model without progress output."""
    settings = {
        "policy_model": decoder(),
        "reward_model": vowels,
        "tokenizer": ByteTokenizer(),
        "learning_rate": 1e-3,
        "steps": 3,
        "batch_size": 16,
        "num_generations": 4,
        "max_new_tokens": 4,
        "output_dir": folder,
        "progress": False,
        **overrides,
    }
    return trainer_class(**settings)


def test_reinforce_plus_plus_normalizes_returns_over_the_rollout(tmp_path: Path) -> None:
    """Compare with verl's loop: backward sums of token rewards, whitened over response tokens."""
    rollout = experience([1.0, 0.0, 0.5, -1.0])
    reinforce = trainer(
        tmp_path,
        advantage_estimator="reinforce_plus_plus",
        kl_coeff=0.1,
        kl_in="reward",
        kl_estimator="k1",
    )
    advantages = reinforce.advantages(rollout, 0.1)["advantages"]
    mask = rollout.mask
    returns = torch.zeros(4, 4)
    for row in range(4):
        running = 0.0
        for s in reversed(range(4)):
            if not mask[row, s]:
                continue
            is_last = s + 1 == 4 or not mask[row, s + 1]
            kl = float(rollout.old_logprobs[row, s] - rollout.reference_logprobs[row, s])
            running += (float(rollout.scores[row]) if is_last else 0.0) - 0.1 * kl
            returns[row, s] = running
    values = returns[mask]
    expected = (values - values.mean()) / (values.var() + 1e-8).sqrt()
    torch.testing.assert_close(advantages[mask], expected)
    assert not advantages[~mask].any()


def test_the_baseline_variant_subtracts_the_mean_of_the_group(tmp_path: Path) -> None:
    """Rewards minus the group's mean, whitened over response tokens."""
    rollout = experience([1.0, 0.0, 0.5, -1.0, 3.0, 2.0, 2.0, 1.0])
    reinforce = trainer(tmp_path, advantage_estimator="reinforce_plus_plus_baseline")
    advantages = reinforce.advantages(rollout, 0.0)["advantages"]
    groups = rollout.scores.view(2, 4)
    centered = (groups - groups.mean(1, keepdim=True)).flatten()
    values = centered[:, None].expand(8, 4)[rollout.mask]
    expected = (values - values.mean()) / (values.var() + 1e-8).sqrt()
    torch.testing.assert_close(advantages[rollout.mask], expected)


def test_returns_to_go_skip_masked_tokens() -> None:
    """A masked reward counts nowhere."""
    rewards = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    mask = torch.tensor([[True, False, True, True]])
    assert returns_to_go(rewards, mask).tolist() == [[13.0, 0.0, 12.0, 8.0]]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Read the events of one kind."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def sparse(samples: Sequence[Sample]) -> list[float]:
    """Reward a third of the responses to one half of the prompts, and all responses to the other.

    Groups of the other prompts have equal rewards.
    """
    return [
        1.0 if len(sample.prompt) % 2 else float(sum(sample.response_tokens) % 3 == 0)
        for sample in samples
    ]


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
def test_groups_with_equal_rewards_are_replaced(tmp_path: Path, trainer_class: Any) -> None:
    """All groups of a rollout have unequal rewards, and generated groups are counted."""
    options = {"reward_model": sparse, "max_resample_times": 20}
    trainer(tmp_path / "with", trainer_class, **options).optimize(PROMPTS)
    rollouts = events(tmp_path / "with", "rollout")
    assert [event["equal_groups"] for event in rollouts] == [0] * 3
    assert sum(event["replaced_groups"] for event in rollouts) > 0
    for event in rollouts:
        assert event["generated_groups"] == 4 * (1 + event["resample_times"])
        assert 0 < event["reward"] < 1
    replaced = [event["replaced_reward"] for event in rollouts if "replaced_reward" in event]
    assert replaced
    assert all(0 <= reward <= 1 for reward in replaced)
    trainer(tmp_path / "without", trainer_class, reward_model=sparse).optimize(PROMPTS)
    assert "equal_groups" not in events(tmp_path / "without", "rollout")[0]


def test_the_number_of_resamples_is_bounded(tmp_path: Path) -> None:
    """With rewards that are always equal, generation ends, and the run is rejected as usual."""
    equal = trainer(
        tmp_path,
        reward_model=lambda samples: [1.0] * len(samples),
        max_resample_times=2,
        equal_rewards_limit=2,
    )
    with pytest.raises(Exception, match="equal in 2 rollouts in a row"):
        equal.optimize(PROMPTS)


def test_a_resampled_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Stop after two updates and continue: the position in the prompts includes the resamples."""
    options = {"reward_model": sparse, "max_resample_times": 20, "checkpoint_every": 1}
    trainer(tmp_path / "whole", steps=4, **options).optimize(PROMPTS)
    trainer(tmp_path / "parts", steps=2, **options).optimize(PROMPTS)
    trainer(tmp_path / "parts", steps=4, **options).optimize(PROMPTS)
    files = [tmp_path / name / "model" / "model.safetensors" for name in ("whole", "parts")]
    whole, parts = map(load_file, files)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    rollouts = [
        [{k: v for k, v in event.items() if k != "time_s"} for event in events(folder, "rollout")]
        for folder in (tmp_path / "whole", tmp_path / "parts")
    ]
    assert rollouts[0] == rollouts[1]


@pytest.mark.parametrize(
    "options",
    [
        {"advantage_estimator": "reinforce_plus_plus", "num_generations": 1},
        {"advantage_estimator": "reinforce_plus_plus_baseline"},
        {"pass_at_k": 2},
    ],
)
def test_a_reward_rises(tmp_path: Path, options: dict[str, Any]) -> None:
    """The fraction of vowels rises from about 2% (5 of 256 bytes) to more than 15%."""
    options = {"steps": 40, "batch_size": 64, "learning_rate": 4e-3, **options}
    trainer(tmp_path, **options).optimize(PROMPTS)
    rewards = [event["reward"] for event in events(tmp_path, "rollout")]
    assert rewards[0] < 0.06
    assert rewards[-1] > 0.15


@pytest.mark.parametrize(
    ("trainer_class", "options", "message"),
    [
        (GRPOTrainer, {"pass_at_k": 4}, "pass_at_k must be below num_generations, 4"),
        (RLOOTrainer, {"pass_at_k": 5}, "pass_at_k must be below num_generations, 4"),
        (GRPOTrainer, {"num_generations": 1}, "num_generations must be"),
        (GRPOTrainer, {"max_resample_times": -1}, "max_resample_times must be"),
        (
            GRPOTrainer,
            {"advantage_estimator": "reinforce_plus_plus", "max_resample_times": 1},
            "change advantage_estimator or remove them",
        ),
    ],
)
def test_contradicting_settings_are_rejected(
    tmp_path: Path, trainer_class: Any, options: dict[str, Any], message: str
) -> None:
    """The message names the setting."""
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, trainer_class, **options)
