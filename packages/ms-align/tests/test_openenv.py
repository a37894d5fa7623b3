"""Environments of OpenEnv servers; `nox -s environments` runs these tests with the package."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from small_models import decoder
from tool_models import STOP, Script, chat_tokenizer

from ms_align import ConfigError, GRPOTrainer
from ms_align.environments.openenv import OpenEnvEnvironment
from ms_align.environments.options import ToolLimits

from .test_environments import run
from .test_online import events

SERVER = Path(__file__).with_name("openenv_server.py")
ENVIRONMENT = "openenv_environments:Countdown"


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port that the environments use."""
    pytest.importorskip("openenv")
    number = free_port()
    monkeypatch.setenv("OPENENV_PORT", str(number))
    # Rows of this module are imported by the process of the environments only.
    monkeypatch.delitem(sys.modules, "openenv_environments", raising=False)
    return number


@contextmanager
def served(port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the server in a separate process."""
    with subprocess.Popen([sys.executable, str(SERVER), str(port)]) as process:
        try:
            for _ in range(1200):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                assert process.poll() is None, "the server has ended"
                time.sleep(0.1)
            yield process
        finally:
            process.kill()


def counter(context: str) -> str:
    """Count down from the last number."""
    last = context.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    return str(int(last.rpartition(" ")[2]) - 1)


@pytest.mark.slow
def test_an_openenv_server_is_an_environment(port: int) -> None:
    """Each episode is a session, with the seed of the episode and the sum of its rewards."""
    with served(port):
        _, responses = run(counter, ["count"] * 12, environment=ENVIRONMENT, max_new_tokens=5)
        _, again = run(counter, ["count"] * 12, environment=ENVIRONMENT, max_new_tokens=5)
    assert responses.episodes is not None
    assert [e.failure for e in responses.episodes] == [""] * 12
    assert {e.reward for e in responses.episodes} == {2.0, 3.0}
    assert all(e.reward == e.turns for e in responses.episodes)
    assert [e.messages for e in again.episodes or ()] == [e.messages for e in responses.episodes]
    starts = {str(e.messages[1]["content"]) for e in responses.episodes}
    assert starts == {"start at 2", "start at 3"}


@pytest.mark.slow
def test_sessions_that_fail_do_not_disturb_the_others(port: int) -> None:
    """One hangs, one raises, two return too much, by either limit: one line each."""
    faults = {1: "hang", 3: "raise", 5: "flood", 7: "flood more"}
    rows: list[dict[str, Any]] = [{"prompt": "count"} for _ in range(10)]
    for index, fault in faults.items():
        rows[index]["fault"] = fault
    limits = ToolLimits(timeout_s=20.0, workers=10)
    with served(port):
        _, responses = run(counter, rows, environment=ENVIRONMENT, limits=limits, max_new_tokens=5)
    assert responses.episodes is not None
    failures = {row: e.failure for row, e in enumerate(responses.episodes) if e.failure}
    assert sorted(failures) == sorted(faults)
    assert failures[1] == "step of the environment: took longer than 20 s"
    assert "no such thing" in failures[3]
    assert failures[5] == "step of the environment: the result exceeds 64 KiB"
    assert "failed" in failures[7]
    assert all("\n" not in failure and len(failure) < 400 for failure in failures.values())
    valid = [e for e in responses.episodes if not e.failure]
    assert all(e.reward == e.turns for e in valid)


@pytest.mark.slow
def test_a_server_that_dies_or_restarts_in_mid_episode_fails_the_episode(port: int) -> None:
    """The client would connect again on its own, to a session that was never reset."""
    with served(port):
        _, responses = run(
            counter, [{"prompt": "a", "fault": "exit"}], environment=ENVIRONMENT, max_new_tokens=5
        )
    assert responses.episodes is not None
    assert "step of the OpenEnv server" in responses.episodes[0].failure
    with served(port) as first:
        turns: list[str] = []
        servers: list[Any] = []

        def respond(context: str) -> str:
            turns.append(context)
            if len(turns) == 2:  # between two steps
                first.kill()
                first.wait()
                servers.append(served(port))
                servers[0].__enter__()
            return counter(context)

        try:
            _, responses = run(respond, ["count"], environment=ENVIRONMENT, max_new_tokens=5)
        finally:
            for server in servers:
                server.__exit__(None, None, None)
    assert responses.episodes is not None
    failure = responses.episodes[0].failure
    assert "OpenEnv server" in failure
    assert "\n" not in failure


@pytest.mark.slow
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 500 No\r\n\r\n", b"\x00" * 65536, None])
def test_a_dead_or_malformed_server_is_one_line(port: int, answer: bytes | None) -> None:
    """Nothing listens, or something that is not OpenEnv does."""
    with socket.socket() as listener:
        if answer is not None:
            listener.bind(("127.0.0.1", port))
            listener.listen()

            def reply() -> None:
                with suppress(OSError):
                    while True:
                        connection, _ = listener.accept()
                        connection.recv(4096)
                        connection.sendall(answer)
                        connection.close()

            threading.Thread(target=reply, daemon=True).start()
        _, responses = run(counter, ["count"], environment=ENVIRONMENT, max_new_tokens=5)
    assert responses.episodes is not None
    failure = responses.episodes[0].failure
    assert f"reset of the OpenEnv server http://127.0.0.1:{port} failed" in failure
    assert "check that it runs" in failure
    assert "\n" not in failure


@pytest.mark.slow
def test_grpo_trains_on_an_openenv_server(port: int, tmp_path: Path) -> None:
    """Two updates, with the environment's rewards."""
    with served(port):
        GRPOTrainer(
            policy_model=decoder(vocab_size=260),
            tokenizer=chat_tokenizer(),
            stop_token_ids=STOP,
            reward_model={
                "environment": "environment",
                "length": lambda samples: list(range(len(samples))),
            },
            generator=Script(chat_tokenizer(), counter, logprobs=False),
            environment=ENVIRONMENT,
            tool_limits=ToolLimits(timeout_s=60.0),
            steps=2,
            batch_size=4,
            num_generations=2,
            max_new_tokens=5,
            max_episode_tokens=400,
            output_dir=tmp_path,
            progress=False,
        ).optimize(["count", "go"])
    rollouts = events(tmp_path, "rollout")
    assert [row["failed_episodes"] for row in rollouts] == [0, 0]
    assert all(row["reward.environment"] >= 2.0 for row in rollouts)


@pytest.mark.slow
def test_a_wrong_field_of_the_observation_names_the_fields(port: int) -> None:
    """The message lists the fields of the observation."""
    with served(port):
        _, responses = run(
            counter, ["count"], environment="openenv_environments:WrongField", max_new_tokens=5
        )
    assert responses.episodes is not None
    assert "must be a field of the observation (" in responses.episodes[0].failure
    assert "text" in responses.episodes[0].failure


def test_a_missing_openenv_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the definition of the class, before anything runs."""
    monkeypatch.setitem(sys.modules, "openenv", None)
    with pytest.raises(ConfigError, match="install it with `pip install openenv`"):

        class Echo(OpenEnvEnvironment):
            """An environment."""
