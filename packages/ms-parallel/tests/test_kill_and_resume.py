"""A killed, stopped or damaged run ends exactly like an uninterrupted one."""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from launching import (
    events,
    losses,
    partial_checkpoints,
    signal_process,
    train,
    training,
    wait_for,
    weights,
    workers,
    write_run,
)

from ms_parallel import checkpoint
from ms_parallel.cli import main


@pytest.fixture(scope="module")
def uninterrupted(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of 2 data ranks."""
    run = write_run(tmp_path_factory.mktemp("whole") / "run.toml", shards)
    result = train(run, 2)
    assert result.returncode == 0, result.stderr
    return run


def assert_the_same(run: Path, uninterrupted: Path) -> None:
    """Check that all losses and the final weights are bit-identical."""
    assert losses(run) == losses(uninterrupted)
    assert weights(run) == weights(uninterrupted)


def kill_one(run: Path, processes: int, when: str, rng: random.Random) -> bool:
    """Start a run and SIGKILL a rank; return False if the run had already ended."""
    with training(run, processes) as started:
        if when == "checkpoint":
            wait_for(lambda: partial_checkpoints(run), started)
        else:
            before = len(events(run, "step"))
            wait_for(lambda: len(events(run, "step")) > before, started)
            time.sleep(rng.uniform(0.0, 0.4))
        victims = workers(started.pid)
        if victims:
            signal_process(rng.choice(victims), signal.SIGKILL)
        return started.wait(timeout=120) != 0


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_killed_in_a_checkpoint_ends_bit_identical(
    shards: Path, uninterrupted: Path, tmp_path: Path, background: bool
) -> None:
    """After a SIGKILL of either rank, with blocking and with background checkpoints."""
    run = write_run(tmp_path / "run.toml", shards, async_checkpoints=background)
    kill_one(run, 2, "checkpoint", random.Random(3))
    result = train(run, 2)
    assert result.returncode == 0, result.stderr
    assert_the_same(run, uninterrupted)
    assert partial_checkpoints(run) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("layout", ["data=2", "tensor=2", "pipeline=2", "data=2,pipeline=2"])
def test_repeated_kills_at_random_moments_change_nothing(
    shards: Path, tmp_path: Path, layout: str, background: bool
) -> None:
    """Twelve kills of random ranks at random moments; half of the kills hit a checkpoint."""
    processes = 4 if "," in layout else 2
    uninterrupted_run, run = (
        write_run(tmp_path / name, shards, steps=40, async_checkpoints=background)
        for name in ("a.toml", "b.toml")
    )
    for path in (uninterrupted_run, run):
        text = path.read_text() + "[parallel_config]\n" + layout.replace(",", "\n") + "\n"
        path.write_text(text)
    assert train(uninterrupted_run, processes).returncode == 0
    rng = random.Random(layout)
    for index in range(12):
        kill_one(run, processes, ("step", "checkpoint")[index % 2], rng)
    result = train(run, processes)
    assert result.returncode == 0, result.stderr
    assert_the_same(run, uninterrupted_run)


def test_torchrun_restarts_a_killed_rank(shards: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """With --max-restarts, a run killed in a step resumes automatically and is bit-identical."""
    run = write_run(tmp_path / "run.toml", shards)
    with training(run, 2, restarts=3) as started:
        wait_for(lambda: checkpoint.complete_steps(run.with_suffix("") / "checkpoints"), started)
        signal_process(workers(started.pid)[1], signal.SIGKILL)
        assert started.wait(timeout=200) == 0, run.with_suffix(".log").read_text()
    assert events(run, "resume")
    assert_the_same(run, uninterrupted)


def test_sigterm_saves_and_another_layout_resumes(
    shards: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """After SIGTERM the last step is saved; under tensor=2 the losses agree within 1e-5."""
    run = write_run(tmp_path / "run.toml", shards, checkpoint_every=None)
    with training(run, 2) as started:
        wait_for(lambda: len(events(run, "step")) >= 3, started)
        started.send_signal(signal.SIGTERM)
        started.wait(timeout=120)
    log = run.with_suffix(".log").read_text()
    assert "stopped by SIGTERM" in log
    assert "the same command resumes" in log
    (last,) = checkpoint.complete_steps(run.with_suffix("") / "checkpoints")
    assert last == max(losses(run))
    result = train(run, 2, "--set", "parallel_config.tensor=2")
    assert result.returncode == 0, result.stderr
    expected = losses(uninterrupted)
    assert list(losses(run)) == list(expected)
    # float32 sums have a different order under another layout: a few rounding errors.
    assert losses(run) == pytest.approx(expected, rel=1e-5)


def flip_a_bit(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(
    shards: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A warning names the file, the folder is renamed, and the end is bit-identical."""
    intact, run = (write_run(tmp_path / name, shards) for name in ("a.toml", "b.toml"))
    assert main(["train", str(intact)]) == 0
    shutil.copytree(intact.with_suffix(""), run.with_suffix(""))
    capsys.readouterr()
    checkpoints = run.with_suffix("") / "checkpoints"
    flip_a_bit(checkpoints / "step-00000012" / "rank-00000.safetensors")
    manifest = checkpoints / "step-00000009" / "checkpoint.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    assert main(["train", str(run)]) == 0
    warnings = caplog.text
    assert "step-00000012/rank-00000.safetensors" in warnings
    assert "step-00000009/checkpoint.json" in warnings
    assert "resuming from" in capsys.readouterr().out
    assert [event["step"] for event in events(run, "damaged_checkpoint")] == [12, 9]
    assert (checkpoints / "step-00000012.damaged-1").is_dir()
    assert_the_same(run, intact)


def test_a_run_refuses_to_start_if_every_checkpoint_is_damaged(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Starting over silently would discard the work; it exits with 2, also when repeated."""
    run = write_run(tmp_path / "run.toml", shards, keep_checkpoints=1, steps=3)
    assert main(["train", str(run)]) == 0
    folder = run.with_suffix("") / "checkpoints" / "step-00000003"
    flip_a_bit(folder / "rank-00000.safetensors")
    for _ in range(2):
        assert main(["train", str(run)]) == 2
        assert "no complete checkpoint is left" in capsys.readouterr().err
