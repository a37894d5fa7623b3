"""Generation ahead of the learner: schedule of versions, ledger, resume, and corrections."""

import math
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from small_models import decoder

from ms_align import (
    ConfigError,
    GRPOTrainer,
    LocalGenerator,
    PPOTrainer,
    Responses,
    RLOOTrainer,
    Sample,
    Sampling,
)
from ms_align.engines.generator import generator_of
from ms_align.engines.local import LocalEngine
from ms_align.losses.importance import off_policy_mask, rejections
from ms_align.models.language_model import copy_of
from ms_align.rollouts.background import BackgroundRollouts
from ms_align.rollouts.generators.policy import PolicyRollouts

from .test_online import PROMPTS, events, settings


def spread(samples: Sequence[Sample]) -> list[float]:
    """Reward that differs within every group."""
    return [sum(sample.response_tokens) % 7 / 6 for sample in samples]


def run(folder: Path, trainer: Any = GRPOTrainer, **overrides: Any) -> list[dict[str, Any]]:
    """Train and return the events of the updates."""
    groups = {} if trainer is PPOTrainer else {"num_generations": 4}
    options = settings(folder, reward_model=spread, learning_rate=1e-2, **{**groups, **overrides})
    assert trainer(**options).optimize(PROMPTS).finished
    return events(folder, "step")


@pytest.mark.parametrize(
    ("trainer", "staleness", "overrides"),
    [
        (GRPOTrainer, 1, {}),
        (GRPOTrainer, 3, {"minibatch_size": 4, "steps": 8}),
        (PPOTrainer, 2, {"epochs": 2, "top_p": 0.9}),
        (RLOOTrainer, 2, {"max_resample_times": 1}),
    ],
)
def test_the_weights_of_each_rollout_are_those_of_so_many_updates_before(
    tmp_path: Path,
    trainer: Any,
    staleness: int,
    overrides: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread with a copy of the policy gives the same updates as generation on schedule.

    Rollout r is sampled with the weights after max(0, r·u - K) updates, for u updates per rollout.
    """
    overrides = {"steps": 6, "max_staleness": staleness, **overrides}
    background = run(tmp_path / "background", trainer, **overrides)
    monkeypatch.setattr(
        "ms_align.rollouts.generators.policy.BackgroundRollouts",
        lambda policy, **options: PolicyRollouts(generator_of(policy, **options)),
    )
    immediate = run(tmp_path / "immediate", trainer, **overrides)
    times = ("rate_tokens_per_s", "learner_wait_s", "generator_wait_s", "time_s")
    for first, second in zip(background, immediate, strict=True):
        assert {k: v for k, v in first.items() if k not in times} == {
            k: v for k, v in second.items() if k not in times
        }
    updates = overrides.get("epochs", 1) * 8 // overrides.get("minibatch_size", 8)
    for version, step in enumerate(background):
        sampled = max(0, version // updates * updates - staleness)
        if not overrides.get("max_resample_times"):
            assert step["staleness"] == version - sampled
            assert step[f"staleness.{version - sampled}"] == 1.0
        assert step["staleness"] <= staleness + updates - 1
    assert background[-1]["sampler_kl"] > 0  # the policy has changed since
    assert background[0]["sampler_difference"] < 1e-5


def test_a_run_ahead_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Checkpoints contain the generated rollouts that are not used yet."""
    overrides: dict[str, Any] = {"max_staleness": 2, "minibatch_size": 4}
    single = run(tmp_path / "single", steps=7, **overrides)
    for steps in (3, 7):
        split = run(tmp_path / "split", steps=steps, **overrides)
    for first, second in zip(single, split, strict=True):
        for name in ("loss", "grad_norm", "reward", "staleness", "sampler_kl"):
            assert first[name] == second[name]
    model = Path("model", "model.safetensors")
    assert (tmp_path / "split" / model).read_bytes() == (tmp_path / "single" / model).read_bytes()


def test_each_job_generates_with_the_weights_of_its_start() -> None:
    """Queued jobs keep the weights they were started with; frozen weights are shared."""
    model = decoder()
    model.get_parameter("model.norm.weight").requires_grad_(False)
    engine = LocalEngine(model)
    rollouts = BackgroundRollouts(engine, max_num_seqs=4, decode=None)
    ask: dict[str, Any] = {"sampling": Sampling(max_new_tokens=6), "count": 2, "seed": 3}
    expected, waits = [], []
    for version in range(3):
        rollouts.update_weights(version)
        expected.append(generator_of(engine)([[5], [6]], **ask))
        waits.append(rollouts.start([[5], [6]], **ask))
        with torch.no_grad():
            for parameter in engine.parameters.values():
                parameter.add_(0.05 * torch.randn(parameter.shape))
    for version, (responses, wait) in enumerate(zip(expected, waits, strict=True)):
        timed = wait()
        assert torch.equal(timed.responses.tokens, responses.tokens)
        assert torch.equal(timed.responses.logprobs, responses.logprobs)  # type: ignore[arg-type]
        assert timed.responses.versions is not None
        assert bool((timed.responses.versions == version).all())
        assert timed.ended_s >= timed.began_s
    shared = rollouts.module.get_parameter("model.norm.weight")
    assert shared.data_ptr() == model.get_parameter("model.norm.weight").data_ptr()
    rollouts.close()


CORRECTIONS = runpy.run_path(
    str(Path(__file__).parents[1] / "benchmarks" / "corrections.py"), run_name="corrections"
)
UNBIASED = {
    "`token_mask`, no limit": [0],
    "`sequence_mask`, no limit": [0, 1, 3],
    "`sequence_mask`, no limit, ratio of responses (`rloo`), no clip": [0, 1, 2, 3],
    "`bypass_mode`, no clip": [0],
    "`bypass_mode`, ratio of responses (`rloo`), no clip": [0, 1, 2, 3],
}
"""Columns of the table in which a correction without limits has the exact policy gradient."""


def test_the_table_of_corrections_is_the_enumeration() -> None:
    """The page shows the computed biases; importance sampling without limits is exact.

    With one token, its ratio is the response's ratio. With three tokens, only the response's ratio
    corrects all of them, and in a later update the ratio of policy to proximal policy matters too.
    """
    text = (Path(__file__).parents[3] / "docs" / "align" / "staleness.md").read_text()
    assert [row for row in CORRECTIONS["rows"]() if row not in text.splitlines()] == []
    for name in CORRECTIONS["CORRECTIONS"]:
        biases = CORRECTIONS["biases"](name)
        for column in UNBIASED.get(name, []):
            assert biases[column] < CORRECTIONS["UNBIASED"], (name, column)
    without = CORRECTIONS["biases"]("none")
    assert min(without[:3]) > 0.1
    assert without[3] > 1e-3  # the int8 copy differs as well
    assert CORRECTIONS["biases"]("`sequence_mask`, 3 (default)")[1] < without[1]


def test_rejections_follow_their_formulas() -> None:
    """Ratios of 1.5 and 0.5 in the first response, 1.01 in the second; padding is never counted."""
    logprobs = torch.tensor([[1.5, 0.5, 9.0], [1.01, 1.01, 1.01]]).log()
    mask = torch.tensor([[True, True, False], [True, True, True]])
    k3 = [0.5 - math.log(1.5), -0.5 - math.log(0.5)]  # 0.0945 and 0.1931
    zeros = torch.zeros_like(logprobs)
    for mode, threshold, rejected in (
        ("token_k1", 1.6, [False, True]),
        ("token_k3", 0.15, [False, True]),
        ("seq_sum_k1", 1.4, [False, False]),
        ("seq_sum_k1", 1.3, [True, True]),  # log 0.75 is below -log 1.3
        ("seq_mean_k1", 1.16, [False, False]),
        ("seq_mean_k1", 1.15, [True, True]),
        ("seq_mean_k3", sum(k3) / 2 - 1e-4, [True, True]),
        ("seq_mean_k3", sum(k3) / 2 + 1e-4, [False, False]),
        ("seq_max_k3", 0.2, [False, False]),
        ("seq_max_k3", 0.19, [True, True]),
    ):
        result = rejections(logprobs, zeros, mask, mode=mode, threshold=threshold)
        assert result.tolist() == [[*rejected, False], [False] * 3], (mode, threshold)
    advantages = torch.tensor([[-1.0] * 3, [1.0] * 3])
    distance = -0.5 * math.log(0.75)
    for threshold, rejected in ((distance - 1e-4, [True, True]), (distance + 1e-4, [False, False])):
        result = off_policy_mask(logprobs, zeros, mask, advantages, threshold)
        assert result.tolist() == [[*rejected, False], [False] * 3]
    assert not off_policy_mask(logprobs, zeros, mask, -advantages, 0.1)[0].any()


def test_an_int8_copy_of_the_policy_is_a_sampler_whose_mismatch_is_reported(tmp_path: Path) -> None:
    """Weights rounded to int8 sample, and the ledger counts their distance and the rejections."""
    model = decoder()

    def sample(*arguments: Any, **options: Any) -> Responses:
        copy = copy_of(model)
        with torch.no_grad():
            for parameter in copy.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(CORRECTIONS["int8_copy"](parameter))
        responses = LocalGenerator(copy, fused=False)(*arguments, **options)
        return evolve(responses, logprobs=None)

    overrides = {"policy_model": model, "generator": sample, "steps": 2}
    limits = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 4e-6}
    for step in run(tmp_path, **overrides, **limits)[:1]:
        assert 0 < step["sampler_kl"] < 0.05
        assert 0 < step["sampler_difference"] < 0.2
        assert 0 < step["sampler_reject_fraction"] < 1
        assert step["staleness"] == 0.0
    bypass = run(tmp_path / "bypass", **overrides, bypass_mode=True)
    assert "sampler_clip_fraction" not in bypass[0]
    # The clipped ratio is that to the sampler, so it is not 1 in the first update.
    assert bypass[0]["kl_old"] > 1e-6


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_staleness": -1}, "max_staleness must be an integer"),
        ({"rollout_rs": "seq_mean_k4", "rollout_rs_threshold": 2.0}, "rollout_rs is 'seq_mean_k4'"),
        ({"rollout_rs": "seq_mean_k1"}, "rollout_rs_threshold and rollout_rs must be set together"),
        ({"rollout_rs_threshold": 2.0}, "rollout_rs_threshold and rollout_rs must be set together"),
        (
            {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 0.5, "max_staleness": 1},
            "rollout_rs_threshold must be a number",
        ),
        ({"bypass_mode": True}, "bypass_mode corrects rollouts from servers or earlier weights"),
        (
            {"generator": "vllm", "vllm": {"url": "http://a:1"}, "max_staleness": 1, "top_k": 5},
            "needs top_k, top_p and min_p at their defaults",
        ),
        (
            {"generator": "vllm", "vllm": {"url": "http://a:1", "in_flight_weight_updates": True}},
            "in_flight_weight_updates needs max_staleness of at least 1",
        ),
    ],
)
def test_settings_without_effect_or_meaning_are_rejected(
    settings: dict[str, Any], text: str
) -> None:
    """Before training, in one line."""
    with pytest.raises(ConfigError, match=text):
        GRPOTrainer(policy_model="x", reward_model=spread, **settings)


def test_a_callable_cannot_run_ahead(tmp_path: Path) -> None:
    """A callable would read the weights in training."""
    with pytest.raises(ConfigError, match=r"max_staleness=1 needs generator = 'policy' or 'vllm'"):
        run(tmp_path, generator=LocalGenerator(decoder()), max_staleness=1)
