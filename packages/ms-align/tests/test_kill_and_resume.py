"""After kill -9 at any moment, the same command ends in the weights of an uninterrupted run."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from processes import run_command
from small_models import decoder

from ms_align.models.folder import save_model
from ms_align.run.checkpoint import complete_steps

from .test_vllm import FakeServer

RUNS = ("reference", "killed")
SCRIPT = Path(__file__).with_name("killed_run.py")


def run(folder: Path, trainer: str, kill_at: int | None = None) -> int:
    """Launch once and return the exit status."""
    words = [str(SCRIPT), str(folder), trainer, *([] if kill_at is None else [str(kill_at)])]
    result = run_command(words, imports=("ms_align.trainers.ppo",))
    assert result.returncode in (0, -signal.SIGKILL), result.stderr[-2000:]
    return result.returncode


def weights(folder: Path) -> bytes:
    """Return the bytes of the trained model file."""
    return (folder / "model" / "model.safetensors").read_bytes()


def steps_of(folder: Path) -> dict[int, dict[str, float]]:
    """Return the last event of each step."""
    lines = (folder / "events.jsonl").read_bytes().splitlines()
    events = [msgspec.json.decode(line) for line in lines]
    keep = ("loss", "grad_norm", "reward", "kl")
    return {e["step"]: {key: e[key] for key in keep} for e in events if e["kind"] == "step"}


def kill_and_resume(tmp_path: Path, trainer: str, moments: list[int]) -> None:
    """Run once undisturbed, in `reference`, and once killed at each of these moments, in `killed`.

    Every kill must hit a running process.
    """
    assert run(tmp_path / "reference", trainer) == 0
    for kill_at in moments:
        assert run(tmp_path / "killed", trainer, kill_at) == -signal.SIGKILL
    assert run(tmp_path / "killed", trainer) == 0


def outcome(folder: Path) -> tuple[Any, Any]:
    """Weights and logged steps of a run."""
    return weights(folder), steps_of(folder)


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Killed during updates: restores buffer, random state, KL coefficient and data position."""
    kill_and_resume(tmp_path, "PPOTrainer", [9])
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "reference")
    assert complete_steps(tmp_path / "killed" / "checkpoints")[-1] == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer",
    ["PPOTrainer", "PPOTrainer-own-value", "GRPOTrainer", "RLOOTrainer-groups"],
)
@pytest.mark.parametrize("kill_at", range(2, 20, 2))
def test_a_run_killed_at_any_moment_resumes_bit_for_bit(
    tmp_path: Path, trainer: str, kill_at: int
) -> None:
    """Every second moment of all trainers: rewards, rollouts, samples, steps, checkpoints."""
    kill_and_resume(tmp_path, trainer, [kill_at])
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "reference")


@pytest.mark.slow
def test_a_killed_run_with_adapters_on_quantized_experts_resumes_bit_for_bit(
    tmp_path: Path,
) -> None:
    """PiSSA's factors are recomputed from the rounded weights; checkpoints have A and B only."""
    kill_and_resume(tmp_path, "GRPOTrainer-experts", [9, 20])
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "reference")
    adapters = [tmp_path / name / "adapter/adapter_model.safetensors" for name in RUNS]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


@pytest.mark.slow
def test_generation_that_runs_ahead_survives_a_kill_at_any_moment(tmp_path: Path) -> None:
    """20 moments with the generator's thread, each killed once and resumed."""
    kill_and_resume(tmp_path, "GRPOTrainer-ahead", [2 + moment % 6 for moment in range(20)])
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "reference")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("victim", ["trainer", "server", "restarted server"])
def test_a_run_ahead_on_a_server_survives_20_kills(
    tmp_path: Path, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer or the server is killed 20 times; the updates match an uninterrupted run.

    A running server that dies ends the run in one line, and the same command resumes with another
    server. A server that the run started is restarted, and the run continues.
    """
    save_model(decoder(), tmp_path / "start")
    started = victim == "restarted server"
    moments = [5] if started else [2 + kill % 6 for kill in range(20)]
    pid_file = tmp_path / "server.pid"
    monkeypatch.setenv("FAKE_VLLM_PID", str(pid_file))
    script = Path(__file__).with_name("fake_vllm.py")
    if started:
        python = tmp_path / "python"
        path = os.pathsep.join(sys.path)
        python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} {script} "$@"\n')
        python.chmod(0o755)
        monkeypatch.setenv("FAKE_VLLM_PYTHON", str(python))
    server: FakeServer | None = None
    outcomes = []
    for moment in [None, *moments, None]:
        if not started and (server is None or server.process.poll() is not None):
            if server is not None:
                server.close()
            server = FakeServer(tmp_path / "start")
            pid_file.write_text(str(server.process.pid))
            monkeypatch.setenv("FAKE_VLLM_URL", server.url)
        name = "killed" if outcomes else "reference"
        words = [str(SCRIPT), str(tmp_path / name), "GRPOTrainer-ahead"]
        if moment is not None:
            words += [str(moment), *([] if victim == "trainer" else [str(pid_file)])]
        result = run_command(words, imports=("ms_align.trainers.ppo",), timeout_s=1200)
        outcomes.append(result.returncode)
        if result.returncode == 1:
            assert "ServerError" in result.stderr.splitlines()[-1]
            assert "cannot be reached" in result.stderr.splitlines()[-1]
        if server is not None and result.returncode == 1:
            server.process.wait(timeout=60)
        if started and moment is not None:
            assert int((tmp_path / "killed" / "kills").read_text()) == 20
    if server is not None:
        server.close()
    expected = {"trainer": -signal.SIGKILL, "server": 1, "restarted server": 0}[victim]
    assert outcomes == [0, *[expected] * len(moments), 0]
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "reference")
    assert weights(tmp_path / "killed") == weights(tmp_path / "reference")
