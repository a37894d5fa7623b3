"""The gateway in OpenAI's format: unmodified agents, and requests that it refuses."""

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_tools import agent, openai_agent, streaming_openai_agent
from safetensors.torch import load_file
from small_models import decoder
from tool_models import STOP, Script, chat_tokenizer

from ms_align import GRPOTrainer, LocalEngine, Responses, Sampling, ToolLimits
from ms_align.environments.agents import AgentRunner
from ms_align.environments.conversation import ChatFormat
from ms_align.environments.gateway import BODY_BYTES, Gateway
from ms_align.environments.pool import ToolPool
from ms_align.environments.tools import target_of
from ms_align.rollouts.generators.policy import PolicyRollouts
from ms_align.rollouts.prompts import read_prompts

from .test_environments import adder
from .test_online import events


def run(rows: list[Any], target: Any = agent, timeout_s: float = 20.0) -> tuple[Script, Responses]:
    """Run agents with a scripted policy."""
    tokenizer = chat_tokenizer()
    script = Script(tokenizer, adder)
    limits = ToolLimits(timeout_s=timeout_s)
    runner = AgentRunner(
        LocalEngine(decoder(vocab_size=260)),
        ChatFormat(tokenizer),
        ToolPool((), target_of(target, "agent"), limits),
        max_episode_tokens=2000,
    )
    sampling = Sampling(max_new_tokens=200, stop_token_ids=STOP)
    try:
        prompts = read_prompts(rows, tokenizer, chat=True)
        responses = runner(PolicyRollouts(script), prompts, sampling, count=1, seed=0)
    finally:
        runner.close()
    return script, responses


def test_an_agent_is_recorded_token_by_token() -> None:
    """Ids, log-probabilities and mask match the policy's, over both requests."""
    script, responses = run([{"prompt": "12 + 30?", "answer": "42"}])
    assert responses.episodes is not None
    (episode,) = responses.episodes
    assert (episode.turns, episode.forks, episode.reward, episode.failure) == (2, 0, 1.0, "")
    first, second = script.contexts
    assert list(episode.prompt) == first
    assert second[: len(first) + len(script.responses[0])] == [*first, *script.responses[0]]
    assert [*episode.prompt, *responses.row(0)] == [*second, *script.responses[1]]
    mask = responses.tool_mask
    assert mask is not None
    sampled = responses.tokens[0][mask[0]].tolist()
    assert sampled == [*script.responses[0], *script.responses[1]]
    assert responses.logprobs is not None
    assert responses.logprobs[0][mask[0]].tolist() == [
        -(index + 1.0) for row in script.responses for index in range(len(row))
    ]


def test_a_streamed_response_is_the_same_response() -> None:
    """Server-sent events with content, calls, the reason of the end, and token counts."""
    row = {"prompt": "12 + 30?", "answer": "42"}
    _, plain = run([row])
    _, streamed = run([{**row, "stream": True}])
    assert plain.episodes is not None
    assert streamed.episodes is not None
    assert streamed.episodes[0].reward == plain.episodes[0].reward == 1.0
    assert streamed.episodes[0].turns == 2
    assert streamed.row(0) == plain.row(0)


def test_an_edited_history_forks_and_failed_agents_are_reported() -> None:
    """Nothing is tokenized again within a branch; the other agents get their rewards."""
    row = {"prompt": "12 + 30?", "answer": "42"}
    faults = [{**row, "edits": True}, {**row, "fault": "raise"}, {**row, "fault": "hang"}, row]
    _, responses = run(faults, timeout_s=3.0)
    assert responses.episodes is not None
    assert [episode.forks for episode in responses.episodes] == [1, 0, 0, 0]
    assert [episode.failure for episode in responses.episodes] == [
        "",
        "agent: ValueError: no such thing",
        "agent: took longer than 3 s",
        "",
    ]
    assert [episode.reward for episode in responses.episodes] == [1.0, None, None, 1.0]


def train(folder: Path, target: Any, **overrides: Any) -> None:
    """Train with GRPO on episodes of an agent."""
    options: dict[str, Any] = {
        "policy_model": decoder(vocab_size=260),
        "tokenizer": chat_tokenizer(),
        "stop_token_ids": STOP,
        "reward_model": {
            "environment": "environment",
            "length": lambda samples: list(range(len(samples))),
        },
        "generator": Script(chat_tokenizer(), adder, logprobs=False),
        "agent": target,
        "tool_limits": ToolLimits(timeout_s=120.0),
        "batch_size": 4,
        "num_generations": 2,
        "max_new_tokens": 100,
        "max_episode_tokens": 600,
        "output_dir": folder,
        "progress": False,
        **overrides,
    }
    GRPOTrainer(**options).optimize([{"prompt": "12 + 30?", "answer": "42"}])


def test_grpo_trains_an_agent(tmp_path: Path) -> None:
    """The agent's result is the reward `environment`."""
    train(tmp_path, agent, steps=1)
    (rollout,) = events(tmp_path, "rollout")
    assert (rollout["turns"], rollout["forks"], rollout["reward.environment"]) == (2.0, 0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("target", [openai_agent, streaming_openai_agent])
def test_an_agent_of_the_openai_client_is_recorded(target: Any) -> None:
    """The client's own requests and types, unchanged; with and without streaming."""
    pytest.importorskip("openai")
    script, responses = run([{"prompt": "12 + 30?", "answer": "42"}], target, timeout_s=120.0)
    assert responses.episodes is not None
    (episode,) = responses.episodes
    assert (episode.turns, episode.forks, episode.reward, episode.failure) == (2, 0, 1.0, "")
    assert [*episode.prompt, *responses.row(0)] == [*script.contexts[1], *script.responses[1]]


@pytest.mark.slow
def test_an_agent_of_the_openai_client_is_trained(tmp_path: Path) -> None:
    """Two updates by GRPO of a model whose sampled responses the client reads."""
    pytest.importorskip("openai")
    train(tmp_path, openai_agent, steps=2, generator=None)
    rollouts = events(tmp_path, "rollout")
    assert [row["failed_episodes"] for row in rollouts] == [0, 0]
    before = decoder(vocab_size=260).state_dict()
    after = load_file(tmp_path / "model" / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before if name in after)


def status(gateway: Gateway, key: str, body: bytes, path: str = "/chat/completions") -> int:
    """Return the HTTP status of a request."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(gateway.base_url + path, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code if json.load(error)["error"]["message"] else 0


def test_bad_requests_are_refused_in_one_line() -> None:
    """Keys, sizes and forms are checked before anything waits."""
    gateway = Gateway()
    try:
        assert gateway.base_url.startswith("http://127.0.0.1:")
        key = gateway.open_session().key
        message = {"role": "user", "content": "a"}
        assert status(gateway, "", b"{}") == 401
        assert status(gateway, "sk-wrong", b"{}") == 401
        assert status(gateway, key, b"{}", "/completions") == 404
        host = gateway.base_url.removeprefix("http://").partition("/")[0]
        connection = http.client.HTTPConnection(host, timeout=10)
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Authorization", f"Bearer {key}")
        connection.putheader("Content-Length", str(BODY_BYTES + 1))
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()
        for body in (
            b"{",
            b"[]",
            b"{}",
            b"[" * 100_000,
            json.dumps({"messages": []}).encode(),
            json.dumps({"messages": [message] * 1001}).encode(),
            json.dumps({"messages": ["a"]}).encode(),
            json.dumps({"messages": [{"role": "user", "content": 3}]}).encode(),
            json.dumps({"messages": [message], "stream": 1}).encode(),
            json.dumps({"messages": [message], "stream_options": [1]}).encode(),
            json.dumps({"messages": [message], "n": 2}).encode(),
            json.dumps({"messages": [message], "max_tokens": -1}).encode(),
            json.dumps({"messages": [message], "tools": "add"}).encode(),
        ):
            assert status(gateway, key, body) == 400, body[:60]
    finally:
        gateway.close()
