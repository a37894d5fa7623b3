"""kill -9 at any moment, then the same command: the weights of an undisturbed run, bit for bit."""

import signal
from pathlib import Path

import msgspec
import pytest
from processes import run_command

from ms_align.run.checkpoint import complete_steps

SCRIPT = Path(__file__).with_name("killed_run.py")


def run(folder: Path, trainer: str, kill_at: int | None = None) -> int:
    """Launch once and return the exit status."""
    words = [str(SCRIPT), str(folder), trainer, *([] if kill_at is None else [str(kill_at)])]
    made = run_command(words, imports=("ms_align.trainers.ppo",))
    assert made.returncode in (0, -signal.SIGKILL), made.stderr[-2000:]
    return made.returncode


def weights(folder: Path) -> bytes:
    """Return the content of the trained model's file."""
    return (folder / "model" / "model.safetensors").read_bytes()


def steps_of(folder: Path) -> dict[int, dict[str, float]]:
    """Return the last event of each step."""
    lines = (folder / "events.jsonl").read_bytes().splitlines()
    events = [msgspec.json.decode(line) for line in lines]
    keep = ("loss", "grad_norm", "reward", "kl")
    return {e["step"]: {key: e[key] for key in keep} for e in events if e["kind"] == "step"}


def check(tmp_path: Path, trainer: str, moments: list[int]) -> None:
    """Compare an undisturbed run with one that is killed at each of the moments in turn."""
    assert run(tmp_path / "whole", trainer) == 0
    for kill_at in moments:
        assert run(tmp_path / "killed", trainer, kill_at) == -signal.SIGKILL
    assert run(tmp_path / "killed", trainer) == 0
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "whole")


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Killed within a rollout's updates: buffer, random state, KL coefficient, data position."""
    check(tmp_path, "PPOTrainer", [9])
    assert complete_steps(tmp_path / "killed" / "checkpoints")[-1] == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer", ["PPOTrainer", "PPOTrainer-own-value", "GRPOTrainer", "RLOOTrainer-groups"]
)
@pytest.mark.parametrize("kill_at", range(2, 20, 2))
def test_a_run_killed_at_any_moment_resumes_bit_for_bit(
    tmp_path: Path, trainer: str, kill_at: int
) -> None:
    """Every second moment of all trainers: rewards, rollouts, samples, steps, checkpoints."""
    check(tmp_path, trainer, [kill_at])
