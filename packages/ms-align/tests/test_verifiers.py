"""Environments of verifiers; `nox -s environments` runs these tests with the real package."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from small_models import decoder
from tool_models import STOP, Script, call, chat_tokenizer

from ms_align import ConfigError, GRPOTrainer, LocalEngine, Responses, RewardError, Sampling
from ms_align.environments import verifiers
from ms_align.environments.agents import AgentRunner
from ms_align.environments.conversation import ChatFormat
from ms_align.environments.options import ToolLimits
from ms_align.environments.pool import ToolPool
from ms_align.environments.verifiers import VerifiersEnvironment, from_verifiers, play
from ms_align.rollouts.generators.policy import PolicyRollouts
from ms_align.rollouts.prompts import read_prompts

from .test_online import events

SUMS = "verifiers_sums"
FAULTS = {"faults": {"0": "raise", "1": "hang"}}


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> VerifiersEnvironment:
    """Sums with a tool."""
    pytest.importorskip("verifiers")
    # verifiers starts the server of the tool as `python -m verifiers_sums_tools`.
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return from_verifiers(SUMS)


def adder(context: str) -> str:
    """Call the tool with the numbers of the question, then repeat its result."""
    if "<|im_start|>tool" in context:
        return context.rpartition("tool\n")[2].partition("<|im_end|>")[0]
    question = context.rpartition("<|im_start|>user\n")[2].partition("?")[0]
    a, b = question.split(" + ")
    return "Let me see. " + call("add", a=int(a), b=int(b))


def run(rows: list[Any], *, timeout_s: float = 300.0) -> tuple[Script, Responses]:
    """Run episodes with a scripted policy."""
    tokenizer = chat_tokenizer()
    script = Script(tokenizer, adder)
    runner = AgentRunner(
        LocalEngine(decoder(vocab_size=260)),
        ChatFormat(tokenizer),
        ToolPool((), VerifiersEnvironment.agent, ToolLimits(timeout_s=timeout_s, workers=4)),
        max_episode_tokens=4000,
    )
    sampling = Sampling(max_new_tokens=200, stop_token_ids=STOP)
    try:
        prompts = read_prompts(rows, tokenizer, chat=True)
        responses = runner(PolicyRollouts(script), prompts, sampling, count=1, seed=0)
    finally:
        runner.close()
    return script, responses


@pytest.mark.slow
def test_an_environment_of_verifiers_is_recorded_token_by_token(
    sums: VerifiersEnvironment,
) -> None:
    """Its own harness, tools and weighted rewards; the tokens are the policy's."""
    rows = list(sums)
    assert [row["prompt"] for row in rows] == [f"{12 + index} + 30?" for index in range(4)]
    assert rows == json.loads(json.dumps(rows))
    script, responses = run(rows)
    assert responses.episodes is not None
    assert [episode.failure for episode in responses.episodes] == [""] * 4
    assert [episode.reward for episode in responses.episodes] == [2.5] * 4
    assert [(episode.turns, episode.forks) for episode in responses.episodes] == [(2, 0)] * 4
    # The second request of each episode keeps the first's tokens.
    contexts = [*zip(script.contexts, script.responses, strict=True)]
    for index, episode in enumerate(responses.episodes):
        entire = [*episode.prompt, *responses.row(index)]
        first, second = contexts[index], contexts[4 + index]
        assert entire == [*second[0], *second[1]]
        assert entire[: len(first[0]) + len(first[1])] == [*first[0], *first[1]]


@pytest.mark.slow
def test_episodes_of_verifiers_that_fail_are_one_line(sums: VerifiersEnvironment) -> None:
    """One raises and one hangs; the others get their rewards."""
    rows = list(from_verifiers(SUMS, config={"taskset": FAULTS}))
    _, responses = run(rows, timeout_s=60.0)
    assert responses.episodes is not None
    first, second, *others = responses.episodes
    assert "the episode of 'verifiers_sums' failed: " in first.failure
    assert "no such thing" in first.failure
    assert "\n" not in first.failure
    assert second.failure == "agent: took longer than 60 s"
    assert [episode.reward for episode in others] == [2.5, 2.5]


@pytest.mark.slow
def test_grpo_trains_on_an_environment_of_verifiers(
    sums: VerifiersEnvironment, tmp_path: Path
) -> None:
    """One update, whose rewards are verifiers'."""
    GRPOTrainer(
        policy_model=decoder(vocab_size=260),
        tokenizer=chat_tokenizer(),
        stop_token_ids=STOP,
        reward_model={
            "environment": "environment",
            "length": lambda samples: list(range(len(samples))),
        },
        generator=Script(chat_tokenizer(), adder, logprobs=False),
        agent=sums.agent,
        tool_limits=ToolLimits(timeout_s=300.0, workers=4),
        steps=1,
        batch_size=4,
        num_generations=2,
        max_new_tokens=100,
        max_episode_tokens=1000,
        output_dir=tmp_path,
        progress=False,
    ).optimize(sums)
    (rollout,) = events(tmp_path, "rollout")
    assert (rollout["turns"], rollout["reward.environment"]) == (2.0, 2.5)


@pytest.mark.slow
def test_unknown_tasksets_settings_and_rows_are_one_line(sums: VerifiersEnvironment) -> None:
    """A package that is not installed, a wrong setting, several agents, and another dataset."""
    for taskset, config in (
        ("no_such_taskset", {}),
        (SUMS, {"taskset": {"counts": 3}}),
        (SUMS, {"agent": {"harness": {"id": "no_such_harness"}}}),
    ):
        with pytest.raises(ConfigError, match="must be an installed taskset") as caught:
            from_verifiers(taskset, config=config)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="must have one agent, the policy"):
        from_verifiers(SUMS, config={"id": "user-sim"})
    with pytest.raises(RewardError, match="train on the rows of from_verifiers"):
        play({"prompt": "1"}, base_url="", api_key="")


def test_a_missing_verifiers_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, in the trainer and in the agent."""
    monkeypatch.setattr(verifiers, "vf", None)
    monkeypatch.setattr(verifiers, "_PROBLEM", "No module named 'verifiers'", raising=False)
    with pytest.raises(ConfigError, match="install it with `pip install verifiers uv`"):
        from_verifiers("sums")
    with pytest.raises(ConfigError, match="install it with"):
        play({}, base_url="", api_key="")
