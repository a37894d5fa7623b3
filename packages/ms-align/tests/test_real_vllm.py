"""Rollouts from vLLM itself, in the environment whose Python is in MS_VLLM_PYTHON.

`nox -s vllm` installs that environment and runs these tests, on a CPU in a few minutes. A server
takes 10 to 60 seconds to start. Models have heads of width 32, the smallest of vLLM's CPU build.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from small_models import decoder
from torch import nn

from ms_align import GRPOTrainer, PPOTrainer, Responses, Sample, Sampling, ServerError
from ms_align.engines.local import LocalEngine
from ms_align.models.folder import save_model
from ms_align.models.language_model import copy_of
from ms_align.rollouts.generators.vllm import VllmRollouts, build
from ms_align.rollouts.rows import logprobs_of, sequences
from ms_align.rollouts.vllm.client import VllmClient
from ms_align.rollouts.vllm.local_server import LocalServer
from ms_align.rollouts.vllm.options import VllmOptions
from ms_align.tokenizer import ByteTokenizer

from .test_online import PROMPTS, events

PYTHON = os.environ.get("MS_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="run `nox -s vllm`, which installs vLLM"),
]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "head_dim": 32,
}
STARTED: dict[str, Any] = {
    "python": PYTHON,
    "arguments": ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager"],
}


def model(family: str, seed: int = 0, *, tied: bool = True) -> nn.Module:
    """Small Llama or Qwen3-MoE."""
    experts = EXPERTS if family == "qwen3_moe" else {}
    return decoder(family, seed, **SIZES, **experts, tie_word_embeddings=tied)


def spread(samples: Sequence[Sample]) -> list[float]:
    """Reward that differs within every group."""
    return [sum(sample.response_tokens) % 7 / 6 for sample in samples]


def settings(folder: Path, **overrides: Any) -> dict[str, Any]:
    """Settings of a run of four updates."""
    return {
        "policy_model": model("llama"),
        "reward_model": spread,
        "tokenizer": ByteTokenizer(),
        "steps": 4,
        "batch_size": 8,
        "num_generations": 4,
        "max_new_tokens": 12,
        "learning_rate": 1e-2,
        "output_dir": folder,
        "progress": False,
        "generator": "vllm",
        "vllm": STARTED,
        **overrides,
    }


@pytest.fixture(scope="module", params=["tied", "untied"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[bool, str]]:
    """A running server of a model with tied or untied head, with other weights than the policy's.

    Yields whether the head is tied, and the address.
    """
    folder = tmp_path_factory.mktemp("server")
    is_tied = request.param == "tied"
    save_model(model("llama", 1, tied=is_tied), folder / "start")
    local = LocalServer(VllmOptions(**STARTED), vocabulary=258, log_path=folder / "vllm-server.log")
    local.start(folder / "start")
    yield is_tied, local.connection.url
    local.close()


@pytest.mark.parametrize("trainer", [GRPOTrainer, PPOTrainer])
def test_vllms_log_probabilities_are_the_policys_after_every_update(
    tmp_path: Path, server: tuple[bool, str], trainer: Any
) -> None:
    """Within 1e-5 in every rollout, each with new weights; the server starts with others."""
    is_tied, url = server
    steps = 4 if trainer is GRPOTrainer else 8
    run = settings(
        tmp_path, policy_model=model("llama", tied=is_tied), vllm={"url": url}, steps=steps
    )
    assert trainer(**run, temperature=0.8, held_out=["to be"]).optimize(PROMPTS).finished
    rollouts = events(tmp_path, "rollout")
    versions = [rollout["weight_version"] for rollout in rollouts]
    # PPO's four epochs use a rollout for four updates.
    assert versions == ([0, 1, 2, 3] if trainer is GRPOTrainer else [0, 4])
    for rollout in rollouts:
        assert rollout["sampler_difference"] < 1e-5
        assert rollout["sampler_clip_fraction"] == 0
    assert len(events(tmp_path, "step")) == steps
    assert all(step["grad_norm"] > 0 for step in events(tmp_path, "step"))


def test_experts_that_vllm_does_not_reload_are_found(tmp_path: Path) -> None:
    """On a CPU, vLLM 0.32 keeps old parts of packed experts; the first update stops the run."""
    run = settings(tmp_path, policy_model=model("qwen3_moe"))
    with pytest.raises(ServerError, match=r"version 1 and still has some of version 0"):
        GRPOTrainer(**run).optimize(PROMPTS)
    (rollout,) = events(tmp_path, "rollout")
    assert rollout["sampler_difference"] < 1e-5


@pytest.mark.parametrize("trainer", [GRPOTrainer, PPOTrainer])
def test_experts_are_trained_with_a_server_that_restarts_for_each_update(
    tmp_path: Path, trainer: Any
) -> None:
    """`weight_update = "restart"`: log-probabilities agree within 1e-5 in every rollout."""
    steps = 3 if trainer is GRPOTrainer else 5
    run = settings(
        tmp_path,
        policy_model=model("qwen3_moe"),
        vllm={**STARTED, "weight_update": "restart"},
        steps=steps,
    )
    assert trainer(**run).optimize(PROMPTS).finished
    rollouts = events(tmp_path, "rollout")
    versions = [rollout["weight_version"] for rollout in rollouts]
    assert versions == ([0, 1, 2] if trainer is GRPOTrainer else [0, 4])
    assert all(rollout["sampler_difference"] < 1e-5 for rollout in rollouts)
    assert all(step["grad_norm"] > 0 for step in events(tmp_path, "step"))


def test_without_staleness_the_updates_are_those_of_the_built_in_path(
    tmp_path: Path, server: tuple[bool, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The responses of a run are given to the built-in path as its own: losses within 1e-5.

    Importance weights differ from 1 by the servers' rounding, 1e-7 per token.
    """
    is_tied, url = server
    recorded: list[Responses] = []
    timed = VllmClient.timed

    def recording(client: VllmClient, *arguments: Any, **options: Any) -> Any:
        result = timed(client, *arguments, **options)
        recorded.append(result.responses)
        return result

    monkeypatch.setattr(VllmClient, "timed", recording)
    run = settings(tmp_path / "vllm", policy_model=model("llama", tied=is_tied))
    run |= {"vllm": {"url": url}, "max_staleness": 0}
    assert GRPOTrainer(**run).optimize(PROMPTS).finished
    replayed = iter(recorded)

    def replay(*arguments: Any, **options: Any) -> Responses:
        responses = next(replayed)
        logprobs = responses.sampling_logprobs
        return evolve(responses, logprobs=logprobs, sampling_logprobs=None, versions=None)

    run = settings(tmp_path / "built-in", policy_model=model("llama", tied=is_tied))
    GRPOTrainer(**{**run, "generator": replay, "vllm": None}).optimize(PROMPTS)
    assert next(replayed, None) is None
    steps = [events(tmp_path / name, "step") for name in ("vllm", "built-in")]
    assert len(steps[0]) == len(steps[1]) == 4
    for served, built_in in zip(*steps, strict=True):
        assert served["staleness"] == 0
        assert served["loss"] == pytest.approx(built_in["loss"], abs=1e-5)
        assert served["reward"] == built_in["reward"]
        assert served["grad_norm"] == pytest.approx(built_in["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_generation_runs_ahead_by_the_schedule(
    tmp_path: Path, server: tuple[bool, str], max_staleness: int
) -> None:
    """The ledger has the staleness of each token, and rollouts the versions of the schedule."""
    is_tied, url = server
    run = settings(tmp_path, policy_model=model("llama", tied=is_tied), steps=5)
    run |= {"vllm": {"url": url}, "max_staleness": max_staleness}
    assert GRPOTrainer(**run).optimize(PROMPTS).finished
    steps, rollouts = events(tmp_path, "step"), events(tmp_path, "rollout")
    expected = [min(step, max_staleness) for step in range(5)]
    assert [step["staleness"] for step in steps] == expected
    assert all(step[f"staleness.{n}"] == 1.0 for step, n in zip(steps, expected, strict=True))
    versions = [max(0, rollout - max_staleness) for rollout in range(5)]
    assert [rollout["weight_version"] for rollout in rollouts[:5]] == versions
    assert steps[0]["sampler_difference"] < 1e-5
    # The policy has moved since; without a correction it would be as far as from another model.
    assert all(1e-5 < step["sampler_difference"] < 0.2 for step in steps[max_staleness + 1 :])
    for step in steps:
        assert step["learner_wait_s"] >= 0
        assert step["generator_wait_s"] >= 0


def test_weights_that_change_in_the_middle_of_a_response(
    tmp_path: Path, server: tuple[bool, str]
) -> None:
    """Every token's log-probability is that of its version, before and after the update.

    Updates are repeated until one falls into a response, at most 20 times.
    """
    is_tied, url = server
    engine = LocalEngine(model("llama", tied=is_tied))
    rollouts = build(
        engine,
        max_num_seqs=8,
        decode=None,
        vllm=VllmOptions(url=url, in_flight_weight_updates=True),
        folder=tmp_path,
        max_staleness=1,
    )
    prompts, policies = [[5, 6], [7]], [copy_of(engine.module)]
    rollouts.update_weights(0)
    compared = {False: 0, True: 0}
    for version in range(1, 21):
        wait = rollouts.start(prompts, Sampling(max_new_tokens=240), count=2, seed=version)
        time.sleep(0.05 * version)
        with torch.no_grad():
            for parameter in engine.parameters.values():
                parameter.add_(0.02 * torch.randn(parameter.shape))
        policies.append(copy_of(engine.module))
        rollouts.update_weights(version)
        responses = wait().responses
        assert responses.versions is not None
        assert bool((responses.versions.diff(dim=1) >= 0).all())
        assert set(responses.versions.unique().tolist()) <= {version - 1, version}
        if len(responses.versions.unique()) < 2:
            continue
        rows = sequences([prompt for prompt in prompts for _ in range(2)], responses)
        for newer in (False, True):
            mask = (rows["targets"] != -100) & (rows["versions"] == version - 1 + newer)
            policy = LocalEngine(policies[version - 1 + newer])
            expected, actual = logprobs_of(policy, rows, 1.0), rows["sampling_logprobs"]
            torch.testing.assert_close(actual[mask], expected[mask], rtol=0, atol=1e-5)
            compared[newer] += int(mask.sum())
        if min(compared.values()) >= 16:
            break
    assert min(compared.values()) >= 16
    rollouts.close()


def test_new_weights_change_the_responses_and_old_ones_are_found(
    tmp_path: Path, server: tuple[bool, str]
) -> None:
    """Each token's log-probability matches its version and no other version."""
    is_tied, url = server
    policies = [LocalEngine(model("llama", seed, tied=is_tied)) for seed in (0, 1)]
    engine = LocalEngine(model("llama", tied=is_tied))
    rollouts: VllmRollouts = build(
        engine, max_num_seqs=16, decode=None, vllm=VllmOptions(url=url), folder=tmp_path
    )
    prompts, sampling = [[5, 6, 7], [11], [20, 21]], Sampling(max_new_tokens=24, temperature=0.7)
    for version, policy in enumerate(policies):
        engine.module.load_state_dict(policy.module.state_dict())
        rollouts.update_weights(version)
        responses = rollouts.generate(prompts, sampling, count=4, seed=1)
        assert responses.versions is not None
        assert bool((responses.versions == version).all())
        rows = sequences([prompt for prompt in prompts for _ in range(4)], responses)
        mask = rows["targets"] != -100
        own, other = (
            (logprobs_of(p, rows, 0.7) - rows["sampling_logprobs"])[mask].abs()
            for p in (policy, policies[1 - version])
        )
        assert float(own.max()) < 1e-5
        assert float(other.mean()) > 0.1
    again = rollouts.generate(prompts, sampling, count=4, seed=1)
    assert torch.equal(again.tokens, responses.tokens)
    rollouts.close()


def test_stop_tokens_and_truncated_sampling(tmp_path: Path, server: tuple[bool, str]) -> None:
    """Only our stop tokens end a response, which includes them; top-k tokens are the likeliest."""
    is_tied, url = server
    engine = LocalEngine(model("llama", tied=is_tied))
    rollouts = build(
        engine, max_num_seqs=16, decode=None, vllm=VllmOptions(url=url), folder=tmp_path
    )
    rollouts.update_weights(0)
    stops = tuple(range(0, 258, 9))
    sampling = Sampling(max_new_tokens=24, stop_token_ids=stops)
    responses = rollouts.generate([[5, 6], [7]], sampling, count=8, seed=3)
    assert int(responses.stopped.sum()) > 0
    for row, stopped in enumerate(responses.stopped.tolist()):
        tokens = responses.row(row)
        assert not set(tokens[:-1]) & set(stops)
        assert stopped == (tokens[-1] in stops)
        assert stopped or len(tokens) == 24
    narrow = rollouts.generate([[5, 6]], Sampling(max_new_tokens=1, top_k=2), count=16, seed=3)
    assert len(set(narrow.tokens[:, 0].tolist())) == 2
    greedy = rollouts.generate([[5, 6]], Sampling(max_new_tokens=4, temperature=0), count=2, seed=3)
    assert torch.equal(greedy.tokens[0], greedy.tokens[1])
    rollouts.close()


def children(pid: int) -> list[int]:
    """Child processes."""
    listing = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(line) for line in listing.stdout.split()]


def descendants(pid: int) -> list[int]:
    """Child processes and theirs, parents first."""
    found = children(pid)
    return [*found, *(below for child in found for below in descendants(child))]


def is_alive(pid: int) -> bool:
    """True unless the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_server_is_restarted_and_the_run_is_the_same(tmp_path: Path) -> None:
    """After kill -9 of the API server in one rollout and the engine in the next: within 1e-5."""
    rollouts: list[int] = []

    def kills(samples: Sequence[Sample]) -> list[float]:
        rollouts.append(len(samples))
        guard = next(pid for pid in children(os.getpid()) if "vllm" in command_of(pid))
        (api_server,) = children(guard)
        if len(rollouts) == 1:
            os.kill(api_server, signal.SIGKILL)
        elif len(rollouts) == 2:
            for engine in children(api_server):
                os.kill(engine, signal.SIGKILL)
        return spread(samples)

    GRPOTrainer(**settings(tmp_path / "calm", steps=3)).optimize(PROMPTS)
    run = settings(tmp_path / "killed", steps=3, reward_model=kills)
    GRPOTrainer(**run).optimize(PROMPTS)
    calm, killed = (events(tmp_path / name, "step") for name in ("calm", "killed"))
    assert len(calm) == len(killed) == 3
    for expected, actual in zip(calm, killed, strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert actual["sampler_difference"] < 1e-5
    # vLLM prints its banner at each start.
    assert (tmp_path / "killed" / "vllm-server.log").read_text().count("non-default args") == 3
    assert [pid for pid in descendants(os.getpid()) if "vllm" in command_of(pid)] == []


def command_of(pid: int) -> str:
    """Command line of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def test_a_killed_trainer_takes_its_server_along_and_resumes(tmp_path: Path) -> None:
    """After kill -9 between updates, no process of vLLM is left; the same command finishes."""
    save_model(model("llama"), tmp_path / "start")
    (tmp_path / "prompts.json").write_text(json.dumps([list(text.encode()) for text in PROMPTS]))
    run = tmp_path / "RUN.toml"
    run.write_text(
        f'model = "{tmp_path}/start"\ndataset = "{tmp_path}/prompts.json"\n'
        f'reward_model = "online_layout_run:spread"\noutput_dir = "{tmp_path}/out"\n'
        f'tokenizer = "bytes"\nsteps = 20\nbatch_size = 8\nnum_generations = 4\n'
        f"max_new_tokens = 12\ncheckpoint_every = 1\nlearning_rate = 1e-2\n"
        f'generator = "vllm"\n[vllm]\npython = "{PYTHON}"\n'
        f"arguments = {json.dumps(STARTED['arguments'])}\n"
    )
    tests = str(Path(__file__).parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *filter(None, sys.path)])}
    command = [sys.executable, "-m", "ms_align", "grpo", str(run)]
    trainer = subprocess.Popen(command, env=env)
    wait_until(lambda: bool(list((tmp_path / "out").glob("checkpoints/step-*2"))), trainer)
    processes = descendants(trainer.pid)
    assert any("vllm" in command_of(pid) for pid in processes)
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not any(map(is_alive, processes)))
    assert subprocess.run(command, env=env, check=False).returncode == 0
    assert [step["step"] for step in events(tmp_path / "out", "step")][-1] == 20
    assert events(tmp_path / "out", "resume")


def run_file(folder: Path, **overrides: Any) -> list[str]:
    """Write a run file of twelve updates that run ahead, and return its command."""
    folder.mkdir()
    save_model(model("llama"), folder / "start")
    (folder / "prompts.json").write_text(json.dumps([list(text.encode()) for text in PROMPTS]))
    keys = {
        "model": f"{folder}/start",
        "dataset": f"{folder}/prompts.json",
        "reward_model": "online_layout_run:spread",
        "output_dir": f"{folder}/out",
        "tokenizer": "bytes",
        "steps": 12,
        "batch_size": 8,
        "num_generations": 4,
        "max_new_tokens": 48,
        "max_staleness": 1,
        "checkpoint_every": 1,
        "learning_rate": 1e-2,
        "generator": "vllm",
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    lines += ["[vllm]", f'python = "{PYTHON}"', f"arguments = {json.dumps(STARTED['arguments'])}"]
    (folder / "RUN.toml").write_text("\n".join(lines))
    return [sys.executable, "-m", "ms_align", "grpo", str(folder / "RUN.toml")]


KILLS = int(os.environ.get("MS_VLLM_KILLS", "6"))
"""Kills of the test below, in turn of trainer, API server and engine."""


def test_random_kills_of_server_engine_and_trainer_change_no_update(tmp_path: Path) -> None:
    """Killed at random points of a run that runs ahead: the losses of an undisturbed run, 1e-5."""
    tests = str(Path(__file__).parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *filter(None, sys.path)])}
    calm_command = run_file(tmp_path / "calm")
    assert subprocess.run(calm_command, env=env, check=False).returncode == 0
    command, generator, out = (
        run_file(tmp_path / "killed"),
        random.Random(0),
        tmp_path / "killed/out",
    )

    def has_step_after(step: int) -> bool:
        return finished() > step

    def finished() -> int:
        return len(events(out, "step")) if (out / "events.jsonl").exists() else 0

    def all_ended(processes: Sequence[int]) -> bool:
        return not any(map(is_alive, processes))

    trainer = subprocess.Popen(command, env=env)
    for kill in range(KILLS):
        wait_until(partial(has_step_after, finished()), trainer)
        time.sleep(generator.uniform(0, 0.3))
        processes = descendants(trainer.pid)
        server = [pid for pid in processes if "api_server" in command_of(pid)][-1]
        assert trainer.poll() is None, "the run ended before its kills; raise steps"
        os.kill((trainer.pid, server, descendants(server)[-1])[kill % 3], signal.SIGKILL)
        if kill % 3 == 0:
            trainer.wait()
            wait_until(partial(all_ended, processes))
            trainer = subprocess.Popen(command, env=env)
    assert trainer.wait() == 0
    last = {step["step"]: step for step in events(out, "step")}
    calm = events(tmp_path / "calm" / "out", "step")
    assert sorted(last) == [step["step"] for step in calm] == list(range(1, 13))
    for step in calm:
        assert last[step["step"]]["loss"] == pytest.approx(step["loss"], abs=1e-5)
        assert last[step["step"]]["reward"] == pytest.approx(step["reward"], abs=1e-5)
        assert last[step["step"]]["staleness"] == step["staleness"]
    assert len(events(out, "resume")) == len(range(0, KILLS, 3))


def wait_until(
    condition: Callable[[], bool], process: "subprocess.Popen[bytes] | None" = None
) -> None:
    """Wait for a condition, up to five minutes."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, "the process ended first"
        time.sleep(0.05)
