"""Rollouts from vLLM servers: results, weight updates, and every way in which a server may fail.

The server is a process with vLLM's endpoints and a small model; `nox -s vllm` runs the trainers
with vLLM itself.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_command
from small_models import decoder, vowels

from ms_align import (
    ConfigError,
    DataError,
    GRPOTrainer,
    PPOTrainer,
    RLOOTrainer,
    Sample,
    Sampling,
    ServerError,
    VllmOptions,
)
from ms_align.cli import main
from ms_align.engines.local import LocalEngine
from ms_align.models.folder import save_model
from ms_align.models.language_model import copy_of
from ms_align.rollouts.generators.vllm import build
from ms_align.rollouts.rows import logprobs_of, sequences
from ms_align.rollouts.vllm.client import VllmClient
from ms_align.tokenizer import ByteTokenizer

from .test_online import PROMPTS, events

KEY = "s3cr3t-key-of-the-server"


class FakeServer:
    """Process with vLLM's endpoints; see `fake_vllm.py`."""

    def __init__(self, folder: Path) -> None:
        script = Path(__file__).with_name("fake_vllm.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, "the server's own output says why it did not start"

    def post(self, path: str, **body: Any) -> Any:
        """Send a request."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def fail(self, name: str, times: int = 10**9) -> None:
        """Misbehave for the next requests that the fault concerns."""
        self.post("/fault", name=name, times=times)

    def served(self) -> dict[str, int]:
        """Number of requests so far, by endpoint."""
        return dict(self.post("/served"))

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model with which servers start."""
    folder = tmp_path_factory.mktemp("vllm") / "start"
    save_model(decoder(seed=1), folder)
    return folder


@pytest.fixture(scope="module")
def shared_server(start: Path) -> Iterator[FakeServer]:
    """One server for the module."""
    server = FakeServer(start)
    yield server
    server.close()


@pytest.fixture
def server(shared_server: FakeServer) -> FakeServer:
    """The server, without a fault."""
    shared_server.fail("none", times=0)
    return shared_server


def settings(folder: Path, server: FakeServer, **overrides: Any) -> dict[str, Any]:
    """Settings of a run that takes a second."""
    vllm = {"url": server.url, "retries": 1, "retry_wait_s": 0.0, "timeout_s": 30.0}
    return {
        "policy_model": decoder(),
        "reward_model": vowels,
        "tokenizer": ByteTokenizer(),
        "steps": 3,
        "batch_size": 8,
        "max_new_tokens": 5,
        "learning_rate": 1e-2,
        "output_dir": folder,
        "progress": False,
        "generator": "vllm",
        **overrides,
        "vllm": {**vllm, **overrides.get("vllm", {})},
    }


def spread(samples: Sequence[Sample]) -> list[float]:
    """Reward that differs within every group."""
    return [sum(sample.response_tokens) % 7 / 6 for sample in samples]


@pytest.mark.parametrize("trainer", [PPOTrainer, GRPOTrainer, RLOOTrainer])
def test_every_rollout_is_sampled_with_the_policys_newest_weights(
    tmp_path: Path, server: FakeServer, trainer: Any
) -> None:
    """Log-probabilities agree within 1e-5 in each of four rollouts, with weights that change.

    The server starts with other weights, so the first rollout needs an update as well.
    """
    groups = {} if trainer is PPOTrainer else {"num_generations": 4}
    epochs = {"epochs": 2, "minibatch_size": 4, "steps": 16}
    run = settings(tmp_path, server, reward_model=spread, temperature=0.8, **groups, **epochs)
    assert trainer(**run, held_out=["to be"], eval_every=3).optimize(PROMPTS).finished
    rollouts = events(tmp_path, "rollout")
    assert len(rollouts) == 4
    for rollout in rollouts:
        assert rollout["sampler_difference"] < 1e-5
        assert abs(rollout["sampler_kl"]) < 1e-8
        assert rollout["sampler_clip_fraction"] == 0.0
    assert [rollout["weight_version"] for rollout in rollouts] == [0, 4, 8, 12]
    steps = events(tmp_path, "step")
    assert all(step["sampler_difference"] < 1e-5 for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps[::4])  # the first update of each rollout
    # Each saved folder is deleted once a newer one is loaded, the last at the end.
    assert not list((tmp_path / "vllm").iterdir())


def test_responses_do_not_depend_on_the_number_of_servers(
    tmp_path: Path, server: FakeServer, start: Path
) -> None:
    """Each prompt has its own seed; prompts are spread evenly, and all servers get new weights."""
    servers = [server, FakeServer(start)]
    try:
        for name, urls in (("one", servers[:1]), ("two", servers)):
            before = [server.served().get("/inference/v1/generate", 0) for server in servers]
            run = settings(tmp_path / name, servers[0], num_generations=4)
            run["vllm"] = {"urls": [server.url for server in urls]}
            GRPOTrainer(**run).optimize(PROMPTS)
            after = [server.served().get("/inference/v1/generate", 0) for server in servers]
        requests = [new - old for new, old in zip(after, before, strict=True)]
        # 3 rollouts of 2 prompts, and a probe before each
        assert requests == [6, 6]
        pairs = zip(events(tmp_path / "one", "step"), events(tmp_path / "two", "step"), strict=True)
        for expected, actual in pairs:
            assert actual["loss"] == expected["loss"]
            assert actual["reward"] == expected["reward"]
        # A dead server's prompts go to the other one, which answers the same.
        engine = LocalEngine(decoder())
        options = VllmOptions(
            urls=[server.url for server in servers], retry_wait_s=0.0, timeout_s=30.0
        )
        rollouts = build(
            engine, max_num_seqs=8, decode=None, vllm=options, folder=tmp_path / "dead"
        )
        rollouts.update_weights(3)
        ask: dict[str, Any] = {"sampling": Sampling(max_new_tokens=6), "count": 2, "seed": 5}
        both = rollouts.generate([[5], [6], [7]], **ask)
        servers[1].process.kill()
        servers[1].process.wait()
        alone = rollouts.generate([[5], [6], [7]], **ask)
        assert torch.equal(both.tokens, alone.tokens)
        rollouts.close()
    finally:
        servers[1].close()


def test_a_running_server_that_comes_back_gets_the_newest_weights(
    tmp_path: Path, server: FakeServer, start: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed after the first rollout and started again with other weights: the same updates.

    The second failure exceeds max_restarts = 1 and ends the run in one line.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(Path(__file__).with_name("fake_vllm.py"))
    command = [sys.executable, script, "--model", str(start), "--port", str(port)]
    running = [subprocess.Popen(command)]
    rewarded: list[int] = []

    def kills(samples: Sequence[Sample]) -> list[float]:
        rewarded.append(len(samples))
        if len(rewarded) in (1, 3):
            running[-1].kill()
            running[-1].wait()
            if len(rewarded) == 1:
                running.append(subprocess.Popen(command))
        return spread(samples)

    run = settings(tmp_path / "calm", server, num_generations=4, reward_model=spread, steps=3)
    GRPOTrainer(**run).optimize(PROMPTS)
    vllm = {"url": f"http://127.0.0.1:{port}", "max_restarts": 1, "start_timeout_s": 60.0}
    run = settings(
        tmp_path / "killed", server, num_generations=4, reward_model=kills, steps=5, vllm=vllm
    )
    with socket.socket() as probe:  # the first start
        while probe.connect_ex(("127.0.0.1", port)):
            time.sleep(0.05)
    with pytest.raises(ServerError, match=r"vllm\.max_restarts = 1 times and failed once more"):
        GRPOTrainer(**run).optimize(PROMPTS)
    calm, killed = (events(tmp_path / name, "step") for name in ("calm", "killed"))
    assert len(calm) == len(killed) == 3
    assert [step["loss"] for step in killed] == [step["loss"] for step in calm]
    assert "restart 1 of 1" in caplog.text


@pytest.mark.slow
def test_a_server_that_restarts_for_each_update_has_the_newest_weights(
    tmp_path: Path, server: FakeServer
) -> None:
    """`weight_update = "restart"` gives the updates of a server that reloads its weights."""
    python, script = tmp_path / "python", Path(__file__).with_name("fake_vllm.py")
    path = os.pathsep.join(filter(None, sys.path))
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} {script} "$@"\n')
    python.chmod(0o755)
    run = settings(tmp_path / "folder", server, num_generations=4, reward_model=spread)
    GRPOTrainer(**run).optimize(PROMPTS)
    run = settings(tmp_path / "restart", server, num_generations=4, reward_model=spread)
    run["vllm"] = {"python": python, "weight_update": "restart", "max_restarts": 0}
    GRPOTrainer(**run).optimize(PROMPTS)
    reloaded, restarted = (events(tmp_path / name, "step") for name in ("folder", "restart"))
    assert [step["loss"] for step in restarted] == [step["loss"] for step in reloaded]
    assert all(step["sampler_difference"] < 1e-5 for step in restarted)
    versions = [rollout["weight_version"] for rollout in events(tmp_path / "restart", "rollout")]
    assert versions == [0, 1, 2]


def test_two_processes_get_the_rollouts_of_one(tmp_path: Path, server: FakeServer) -> None:
    """The first process sends the requests; losses agree within 1e-5, and a failure ends both."""
    save_model(decoder(), tmp_path / "start")
    script = str(Path(__file__).with_name("vllm_layout_run.py"))
    for axis, count in (("one", 1), ("data", 2)):
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        command += [script, str(tmp_path), axis, server.url]
        imports = ("ms_align.trainers.grpo", "ms_parallel.engine.engine")
        result = run_command(command, imports=imports)
        assert result.returncode == 0, result.stderr[-3000:]
    single, parallel = (events(tmp_path / name, "step") for name in ("one", "data"))
    assert len(single) == len(parallel) == 4
    for expected, actual in zip(single, parallel, strict=True):
        for name in ("loss", "reward", "kl", "entropy", "kl_old"):
            assert actual[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
        assert actual["sampler_difference"] < 1e-5
    assert sum(rollout["stopped"] for rollout in events(tmp_path / "data", "rollout")) > 0
    first, second = sorted((tmp_path / "errors.txt").read_text().splitlines())
    assert "a rollout failed on the first process" in first
    assert "cannot be reached (Connection refused)" in second


def test_responses_carry_tokens_logprobs_stops_and_versions(
    tmp_path: Path, server: FakeServer
) -> None:
    """Log-probabilities equal a forward pass; stop tokens and strings end responses."""
    engine = LocalEngine(decoder())
    options = VllmOptions(url=server.url)
    rollouts = build(
        engine, max_num_seqs=3, decode=ByteTokenizer().decode, vllm=options, folder=tmp_path
    )
    rollouts.update_weights(7)
    sampling = Sampling(
        max_new_tokens=24, temperature=0.7, stop_token_ids=range(0, 258, 9), stop_strings=("A", "7")
    )
    prompts = [[5, 6, 7], [11], [20, 21]]
    responses = rollouts.generate(prompts, sampling, count=3, seed=1)
    assert responses.logprobs is None
    assert responses.sampling_logprobs is not None
    assert responses.versions is not None
    assert torch.equal(responses.versions, torch.full_like(responses.tokens, 7))
    ends = [responses.row(row)[-1] for row in range(9)]
    for end, stopped in zip(ends, responses.stopped.tolist(), strict=True):
        assert stopped == (end % 9 == 0 or end in b"A7")
    assert int(responses.stopped.sum()) > 0
    # Different responses to a prompt, and the same ones again for the same seed.
    assert len({tuple(responses.row(row)) for row in range(9)}) == 9
    repeated = rollouts.generate(prompts, sampling, count=3, seed=1)
    assert torch.equal(repeated.tokens, responses.tokens)
    rows = sequences([prompt for prompt in prompts for _ in range(3)], responses)
    mask = rows["targets"] != -100
    expected = logprobs_of(engine, rows, 0.7)
    torch.testing.assert_close(rows["sampling_logprobs"][mask], expected[mask], rtol=0, atol=1e-5)
    rollouts.close()


def test_a_run_that_stops_resumes_with_the_servers(tmp_path: Path, server: FakeServer) -> None:
    """Two launches give the updates of a single one, as responses depend on weights and seed."""
    run = settings(tmp_path / "single", server, num_generations=4, steps=4)
    GRPOTrainer(**run).optimize(PROMPTS)
    for steps in (2, 4):
        run = settings(tmp_path / "split", server, num_generations=4, steps=steps)
        GRPOTrainer(**run).optimize(PROMPTS)
    single, split = (events(tmp_path / name, "step") for name in ("single", "split"))
    assert [step["loss"] for step in split] == [step["loss"] for step in single]
    model = Path("model", "model.safetensors")
    assert (tmp_path / "split" / model).read_bytes() == (tmp_path / "single" / model).read_bytes()


FAULTS = {
    "malformed": "must answer in JSON, and the answer is malformed",
    "html": "must answer in JSON, and the answer is malformed",
    "empty": "must answer in JSON, and the answer is malformed",
    "latin": "gave an answer that vLLM would not give",
    "other_shape": "gave an answer that vLLM would not give",
    "null_logprob": "gave an answer that vLLM would not give",
    "nan_logprob": "must answer in JSON, and the answer is malformed",
    "infinite_logprob": "must answer in JSON, and the answer is malformed",
    "positive_logprob": "must have finite log-probabilities of at most 0 but has 0.5",
    "no_logprobs": "must have 5 log-probabilities but has 0",
    "few_logprobs": "must have 5 log-probabilities but has 4",
    "other_token_logprob": "has the log-probability of token",
    "raw_logprobs": "max_logprob_difference = 0.2 of the policy's, and they differ by 0.25",
    "foreign_token": "has the token 258 and the policy's vocabulary is 258",
    "negative_token": "has the token -1 and the policy's vocabulary is 258",
    "many_tokens": "must have 1 to 5 tokens but has 10",
    "no_tokens": "must have 1 to 5 tokens but has 0",
    "few_tokens": "must have 5 tokens unless it stops but has 4",
    "no_stop": "must stop at the first of stop_token_ids and does not",
    "beyond_stop": "must end at its first stop token, but continues after it",
    "few_responses": "must have 4 responses but has 3",
    "aborted": "ended a response with 'abort'",
    "other_version": "must be sampled with weights of version 0 but has version 99",
    "no_versions": "must have the weight version of each token",
    "gap_in_versions": "must have the weight version of each token",
    "older_version": "must be sampled with weights of version 0 but has version older",
    "closed": "cannot be reached (Remote end closed connection without response)",
    "closed_in_answer": "cannot be reached (the connection closed in the middle of the answer)",
    "not_http": "cannot be reached",
    "slow": "must answer within 0.5 s and did not",
    "dripping": "must answer within 0.5 s and did not",
    "endless": "must answer with at most",
    "redirect": "redirects to 'http://127.0.0.1:9/'",
    "unauthorized": "set the environment variable VLLM_API_KEY to the server's key",
    "not_found": "responses need a server that was started with --enable-scale-out",
    "failed": "failed (HTTP 500: failed for Bearer ***)",
    "overloaded": "failed (HTTP 503: overloaded)",
    "too_many": "failed (HTTP 429: too many requests)",
    "rejected": "rejected the request (HTTP 400: max_tokens is wrong)",
    "no_dev_mode": "weight updates need a server that was started with VLLM_SERVER_DEV_MODE=1",
    "reload_fails": "Call to collective_rpc method failed); see the server's log; new weights are",
    "other_models": "offers the models ['policy', 'other']; choose one with vllm.model",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_ends_the_run_in_one_line(
    tmp_path: Path,
    server: FakeServer,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A rollout with any bad part is never trained on, and no message contains the key."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    server.fail(fault)
    timeout_s = 0.5 if fault in ("slow", "dripping") else 30.0
    run = settings(
        tmp_path,
        server,
        num_generations=4,
        stop_token_ids=(0,),
        vllm={"timeout_s": timeout_s, "retry_wait_s": 0.0},
    )
    with pytest.raises((ServerError, ConfigError)) as caught:
        GRPOTrainer(**run).optimize(PROMPTS)
    message = str(caught.value)
    assert FAULTS[fault] in message
    assert "\n" not in message
    assert events(tmp_path, "step") == events(tmp_path, "rollout") == []
    written = [path.read_text() for path in tmp_path.rglob("*.jsonl")]
    assert not any(KEY in text for text in [message, caplog.text, *written])


@pytest.mark.parametrize(
    "fault",
    [
        *("malformed", "closed_in_answer", "overloaded"),
        *(
            pytest.param(fault, marks=pytest.mark.slow)
            for fault in ("empty", "closed", "failed", "too_many")
        ),
    ],
)
def test_a_request_that_failed_once_is_repeated(
    tmp_path: Path, server: FakeServer, fault: str
) -> None:
    """The run is the same as without the fault."""
    run = settings(tmp_path / "calm", server, num_generations=4)
    GRPOTrainer(**run).optimize(PROMPTS)
    server.fail(fault, times=1)
    run = settings(tmp_path / "failed", server, num_generations=4)
    GRPOTrainer(**run).optimize(PROMPTS)
    calm, failed = (events(tmp_path / name, "step") for name in ("calm", "failed"))
    assert [step["loss"] for step in failed] == [step["loss"] for step in calm]


def test_a_server_that_keeps_old_weights_stops_the_run(tmp_path: Path, server: FakeServer) -> None:
    """At the first update that it ignores, although it reports success."""
    calls = []

    def reward(samples: Any) -> list[float]:
        calls.append(len(samples))
        server.fail("kept_weights")  # after the first rollout
        return vowels(samples)

    run = settings(tmp_path, server, reward_model=reward, steps=9, learning_rate=1e-4)
    with pytest.raises(
        ServerError, match=r"must have the weights of version 4 and still has some of version 0"
    ):
        PPOTrainer(**run, epochs=4).optimize(PROMPTS)
    assert len(events(tmp_path, "rollout")) == len(calls) == 1
    # A server that keeps some of the old weights, as vLLM 0.32 keeps a tied head on a CPU.
    server.fail("none", times=0)

    def reward_then_fail(samples: Sequence[Sample]) -> list[float]:
        server.fail("kept_head")
        return spread(samples)

    run = settings(tmp_path / "head", server, reward_model=reward_then_fail, learning_rate=1e-4)
    with pytest.raises(ServerError, match=r"version 1 and still has some of version 0"):
        GRPOTrainer(**run, num_generations=4).optimize(PROMPTS)
    # The server has another model's weights from the start.
    server.fail("none", times=0)
    server.post("/collective_rpc", kwargs={"weights_path": str(save(tmp_path / "other", 2))})
    server.fail("kept_weights")
    with pytest.raises(ServerError, match=r"max_logprob_difference = 0.2 of the policy's"):
        PPOTrainer(**settings(tmp_path / "first", server)).optimize(PROMPTS)
    assert events(tmp_path / "first", "step") == []


def save(folder: Path, seed: int) -> Path:
    """Save a model."""
    save_model(decoder(seed=seed), folder)
    return folder


def test_a_server_that_is_missing_or_of_another_model_ends_the_run(
    tmp_path: Path, server: FakeServer
) -> None:
    """A closed port, a name that does not resolve, another model's name, and prompts too long."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}"
    for vllm, text in (
        ({"url": closed}, r"cannot be reached \(Connection refused\).*\(attempts: 2\)"),
        ({"url": "http://no-such-host.invalid"}, r"cannot be reached"),
        ({"model": "gpt"}, r"must offer the model 'gpt' but offers \['policy'\]"),
    ):
        run = settings(tmp_path, server, vllm=vllm)
        with pytest.raises((ServerError, ConfigError), match=text):
            PPOTrainer(**run).optimize(PROMPTS)
    with pytest.raises(DataError, match=r"exceeds the server's context of 128"):
        PPOTrainer(**settings(tmp_path, server, max_new_tokens=126)).optimize(PROMPTS)
    assert events(tmp_path, "step") == []


@pytest.mark.parametrize(
    ("vllm", "text"),
    [
        ({}, "exactly one of url, urls and python, got none"),
        ({"url": "http://a:1", "python": sys.executable}, "got url and python"),
        ({"url": "localhost:8000"}, r"an address such as .*, got 'localhost:8000'"),
        ({"url": "http://a:99999"}, "an address such as"),
        ({"url": "http://a:8000/v1"}, r"must end after the port, .* remove the path '/v1'"),
        ({"url": f"http://me:{KEY}@a:8000"}, "must not contain a user"),
        ({"urls": ["http://a:1", "http://a:1"]}, "must be different servers"),
        ({"urls": "http://a:1"}, "must be a list"),
        ({"python": "/no/python"}, "'/no/python' is not executable"),
        ({"url": "http://a:1", "arguments": ["--dtype"]}, "vllm.arguments are for a server"),
        ({"url": "http://a:1", "weight_update": "nccl"}, "weight_update is 'nccl'"),
        ({"url": "http://a:1", "weight_update": "restart"}, "set vllm.python or weight_update"),
        ({"url": "http://a:1", "api_key_env": f"{KEY}"}, "must be the name of an environment"),
        ({"url": "http://a:1", "retries": -1}, "retries must be an integer"),
        ({"url": "http://a:1", "max_restarts": -1}, "max_restarts must be an integer"),
        ({"url": "http://a:1", "timeout_s": 0}, "timeout_s must be a number"),
        ({"url": "http://a:1", "tiemout_s": 9}, "did you mean 'timeout_s'"),
        (5, "vllm must be VllmOptions or a table"),
    ],
)
def test_bad_settings_are_reported_before_training(tmp_path: Path, vllm: Any, text: str) -> None:
    """Addresses, their number, and what belongs to a started server; never with a password."""
    with pytest.raises(ConfigError, match=text) as caught:
        PPOTrainer(policy_model="x", reward_model=vowels, generator="vllm", vllm=vllm)
    assert KEY not in str(caught.value)


def test_generator_and_vllm_belong_together() -> None:
    """One without the other would silently use the other engine."""
    with pytest.raises(ConfigError, match=r"set vllm\.url, or vllm\.python to start"):
        PPOTrainer(policy_model="x", reward_model=vowels, generator="vllm")
    with pytest.raises(ConfigError, match="set generator = 'vllm', or remove vllm"):
        PPOTrainer(policy_model="x", reward_model=vowels, vllm={"url": "http://a:1"})


def test_the_commands_use_a_server(
    tmp_path: Path, server: FakeServer, start: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ms-align grpo` trains, `ms-align generate` writes responses; a bad server is one line."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "a"}\n')
    common = [f"dataset={tmp_path}/prompts.jsonl", "tokenizer=bytes", "max_new_tokens=4"]
    common += ["generator=vllm", f"vllm.url={server.url}", "vllm.retries=0"]
    run = tmp_path / "RUN.toml"
    run.write_text(f'model = "{start}"\n')
    out = tmp_path / "responses.jsonl"
    assert main(["generate", str(run), *common, f"output_path={out}", "num_generations=2"]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 4
    assert all(len(r["tokens"]) == len(r["logprobs"]) == 4 for r in records)
    common += ["reward_model=small_models:vowels", "steps=1", "batch_size=8", "num_generations=4"]
    assert main(["grpo", str(run), *common, f"output_dir={tmp_path}/out", "progress=false"]) == 0
    capsys.readouterr()
    server.fail("no_logprobs")
    assert main(["grpo", str(run), *common, f"output_dir={tmp_path}/bad", "progress=false"]) == 1
    error = capsys.readouterr().err
    assert "must have 4 log-probabilities but has 0" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate"])
def test_importance_weights_are_in_the_advantages(
    tmp_path: Path, server: FakeServer, mode: str
) -> None:
    """A sampler that is off by one nat per token: ratios of e, cut at 2 or masked."""
    server.fail("raw_logprobs")
    run = settings(
        tmp_path,
        server,
        max_logprob_difference=1.5,
        importance_sampling_mode=mode,
        importance_sampling_clip_max=2.0,
        num_generations=4,
        steps=1,
    )
    GRPOTrainer(**run).optimize(PROMPTS)
    (step,) = events(tmp_path, "step")
    # `raw_logprobs` shifts the first of four responses to each prompt.
    assert step["sampler_difference"] == pytest.approx(0.25, abs=1e-5)
    assert step["sampler_kl"] == pytest.approx(0.25 * (torch.e - 2), abs=1e-5)
    assert step["sampler_clip_fraction"] == pytest.approx(0.25)


def test_a_started_server_is_stopped_and_a_broken_one_is_one_line(tmp_path: Path) -> None:
    """A Python without vLLM: the last line of its output, and its log."""
    engine = LocalEngine(decoder())
    options = VllmOptions(python=sys.executable, start_timeout_s=60.0)
    rollouts = build(engine, max_num_seqs=8, decode=None, vllm=options, folder=tmp_path)
    with pytest.raises(ServerError, match=r"ended while it started \(.*No module named 'vllm'"):
        rollouts.update_weights(0)
    rollouts.close()
    assert "No module named 'vllm'" in (tmp_path / "vllm-server.log").read_text()
    shutil.rmtree(tmp_path)


def test_the_client_rejects_prompts_that_end_vllms_engine(server: FakeServer) -> None:
    """Empty prompts, foreign tokens and stop strings without a tokenizer."""
    options = VllmOptions(url=server.url)
    client = VllmClient(options, vocabulary=258, max_num_seqs=4, log_path=Path("unused"))
    client.open()
    for prompts, text in (
        ([], "prompts are empty"),
        ([[]], "prompt 0 is empty"),
        ([[5], [258]], "prompt 1 has a token outside the vocabulary of 258"),
        ([[-1]], "prompt 0 has a token outside"),
    ):
        with pytest.raises(DataError, match=text):
            client(prompts, Sampling(max_new_tokens=4))
    client.close()


def test_generation_on_a_server_runs_ahead_by_the_schedule(
    tmp_path: Path, server: FakeServer
) -> None:
    """Each rollout has the weights of two updates before; a run in two parts gives the same."""
    overrides: dict[str, Any] = {"num_generations": 4, "max_staleness": 2, "reward_model": spread}
    run = settings(tmp_path / "single", server, steps=4, **overrides)
    GRPOTrainer(**run, held_out=["to be"], eval_every=4).optimize(PROMPTS)
    for steps in (2, 4):
        run = settings(tmp_path / "split", server, steps=steps, **overrides)
        GRPOTrainer(**run).optimize(PROMPTS)
    single, split = (events(tmp_path / name, "step") for name in ("single", "split"))
    assert [step["staleness"] for step in single] == [0, 1, 2, 2]
    assert single[0]["sampler_difference"] < 1e-5
    assert all(step["sampler_kl"] > 0 for step in single[1:])
    for name in ("loss", "reward", "staleness", "sampler_kl"):
        assert [step[name] for step in split] == [step[name] for step in single]
    assert not list((tmp_path / "single" / "vllm").iterdir())


def test_each_token_has_the_version_that_sampled_it(tmp_path: Path, server: FakeServer) -> None:
    """Weights change in the middle of responses: log-probabilities agree with each version."""
    server.post("/stepwise", delay_s=0.01)
    engine = LocalEngine(decoder())
    options = VllmOptions(url=server.url, in_flight_weight_updates=True)
    rollouts = build(
        engine, max_num_seqs=8, decode=None, vllm=options, folder=tmp_path, max_staleness=1
    )
    ask: dict[str, Any] = {"sampling": Sampling(max_new_tokens=48), "count": 2, "seed": 4}
    prompts = [[5, 6], [7]]
    waits, policies = [], []
    try:
        for version in range(2):
            policies.append(copy_of(engine.module))
            rollouts.update_weights(version)
            waits.append(rollouts.start(prompts, **ask))
            before = server.served()["tokens"]
            while version == 0 and server.served()["tokens"] < before + 16:
                time.sleep(0.01)
            with torch.no_grad():
                for parameter in engine.parameters.values():
                    parameter.add_(0.02 * torch.randn(parameter.shape))
        first, second = (wait().responses for wait in waits)
    finally:
        server.post("/stepwise", delay_s=None)
        rollouts.close()
    repeated = [prompt for prompt in prompts for _ in range(2)]
    compared = {0: 0, 1: 0}
    for responses in (first, second):
        rows = sequences(repeated, responses)
        for version, policy in enumerate(policies):
            mask = (rows["targets"] != -100) & (rows["versions"] == version)
            expected = logprobs_of(LocalEngine(policy), rows, 1.0)
            actual = rows["sampling_logprobs"]
            torch.testing.assert_close(actual[mask], expected[mask], rtol=0, atol=1e-5)
            compared[version] += int(mask.sum())
    assert first.versions is not None
    assert second.versions is not None
    assert min(compared.values()) >= 16
    assert bool((first.versions.diff(dim=1) >= 0).all())
    assert len(first.versions.unique()) == 2
    assert bool((second.versions == 1).all())
