"""Rollouts from vLLM itself, in the environment whose Python is in MS_VLLM_PYTHON.

`nox -s vllm` installs that environment and runs these tests, on a CPU in a few minutes. A server
takes 10 to 60 seconds to start. Models have heads of width 32, the smallest of vLLM's CPU build.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import decoder
from torch import nn

from ms_align import GRPOTrainer, PPOTrainer, Sample, Sampling, ServerError
from ms_align.engines.local import LocalEngine
from ms_align.models.folder import save_model
from ms_align.rollouts.generators.vllm import VllmRollouts, build
from ms_align.rollouts.rows import logprobs_of, sequences
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


def wait_until(
    condition: Callable[[], bool], process: "subprocess.Popen[bytes] | None" = None
) -> None:
    """Wait for a condition, up to five minutes."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, "the process ended first"
        time.sleep(0.05)
