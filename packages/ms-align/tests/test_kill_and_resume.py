"""After kill -9 at any moment, the same command ends in the weights of an uninterrupted run."""

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


def check(tmp_path: Path, trainer: str, moments: list[int]) -> None:
    """Compare an uninterrupted run with one killed at each of these moments and resumed."""
    assert run(tmp_path / "reference", trainer) == 0
    for kill_at in moments:
        assert run(tmp_path / "killed", trainer, kill_at) == -signal.SIGKILL
    assert run(tmp_path / "killed", trainer) == 0
    assert weights(tmp_path / "killed") == weights(tmp_path / "reference")
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "reference")


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Killed during updates: restores buffer, random state, KL coefficient and data position."""
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
