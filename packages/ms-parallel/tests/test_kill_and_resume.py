"""A run that is killed, stopped or damaged comes to exactly where an undisturbed one comes."""

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
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 data ranks that nobody disturbs."""
    run = write_run(tmp_path_factory.mktemp("whole") / "run.toml", shards)
    done = train(run, 2)
    assert done.returncode == 0, done.stderr
    return run


def assert_the_same(run: Path, undisturbed: Path) -> None:
    """Every step's loss and the last weights are bit for bit those of the other run."""
    assert losses(run) == losses(undisturbed)
    assert weights(run) == weights(undisturbed)


def kill_one(run: Path, processes: int, when: str, draw: random.Random) -> bool:
    """Start a run and kill -9 one of its ranks; False if it had ended before."""
    with training(run, processes) as started:
        if when == "checkpoint":
            wait_for(lambda: partial_checkpoints(run), started)
        else:
            before = len(events(run, "step"))
            wait_for(lambda: len(events(run, "step")) > before, started)
            time.sleep(draw.uniform(0.0, 0.4))
        victims = workers(started.pid)
        if victims:
            signal_process(draw.choice(victims), signal.SIGKILL)
        return started.wait(timeout=120) != 0


@pytest.mark.parametrize("beside", [False, True])
def test_a_run_killed_in_a_checkpoint_ends_bit_identical(
    shards: Path, undisturbed: Path, tmp_path: Path, beside: bool
) -> None:
    """Kill -9 of either rank, then the same command: losses and weights are those undisturbed.

    Whether the run waits for its checkpoints or has them written beside it.
    """
    run = write_run(tmp_path / "run.toml", shards, async_checkpoints=beside)
    kill_one(run, 2, "checkpoint", random.Random(3))
    done = train(run, 2)
    assert done.returncode == 0, done.stderr
    assert_the_same(run, undisturbed)
    assert partial_checkpoints(run) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("layout", ["data=2", "tensor=2", "pipeline=2", "data=2,pipeline=2"])
def test_any_number_of_kills_at_any_moment_changes_nothing(
    shards: Path, tmp_path: Path, layout: str, beside: bool
) -> None:
    """Twelve kills of random ranks at random moments, half of them inside a checkpoint."""
    processes = 4 if "," in layout else 2
    whole, run = (
        write_run(tmp_path / name, shards, steps=40, async_checkpoints=beside)
        for name in ("a.toml", "b.toml")
    )
    for path in (whole, run):
        text = path.read_text() + "[parallel_config]\n" + layout.replace(",", "\n") + "\n"
        path.write_text(text)
    assert train(whole, processes).returncode == 0
    draw = random.Random(layout)
    for number in range(12):
        kill_one(run, processes, ("step", "checkpoint")[number % 2], draw)
    done = train(run, processes)
    assert done.returncode == 0, done.stderr
    assert_the_same(run, whole)


def test_torchrun_starts_a_killed_rank_again_by_itself(
    shards: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """With --max-restarts a run killed in a step goes on by itself, and ends bit-identical."""
    run = write_run(tmp_path / "run.toml", shards)
    with training(run, 2, restarts=3) as started:
        wait_for(lambda: checkpoint.complete_steps(run.with_suffix("") / "checkpoints"), started)
        signal_process(workers(started.pid)[1], signal.SIGKILL)
        assert started.wait(timeout=200) == 0, run.with_suffix(".log").read_text()
    assert events(run, "resume")
    assert_the_same(run, undisturbed)


def test_sigterm_saves_and_another_layout_goes_on(
    shards: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """After SIGTERM the last step is saved; under tensor=2 the losses go on within 1e-5."""
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
    done = train(run, 2, "--set", "parallel_config.tensor=2")
    assert done.returncode == 0, done.stderr
    expected = losses(undisturbed)
    assert list(losses(run)) == list(expected)
    # Sums in float32 come in another order under another layout: a few rounding errors.
    assert losses(run) == pytest.approx(expected, rel=1e-5)


def flip_a_bit(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    shards: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The damaged one is kept aside, a warning names the file, and the end is bit-identical."""
    whole, run = (write_run(tmp_path / name, shards) for name in ("a.toml", "b.toml"))
    assert main(["train", str(whole)]) == 0
    shutil.copytree(whole.with_suffix(""), run.with_suffix(""))
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
    assert_the_same(run, whole)


def test_if_every_checkpoint_is_damaged_the_run_refuses(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Starting over in silence would throw the work away: it says so and exits with 2, twice."""
    run = write_run(tmp_path / "run.toml", shards, keep_checkpoints=1, steps=3)
    assert main(["train", str(run)]) == 0
    folder = run.with_suffix("") / "checkpoints" / "step-00000003"
    flip_a_bit(folder / "rank-00000.safetensors")
    for _ in range(2):
        assert main(["train", str(run)]) == 2
        assert "no complete checkpoint is left" in capsys.readouterr().err
