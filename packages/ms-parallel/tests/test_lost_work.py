"""Failures of the disk, the writer, the data or the network end a run with one line."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from background_runs import KEPT, state_of
from launching import (
    checkpoints,
    environment,
    events,
    signal_process,
    train,
    training,
    wait_for,
    write_corpus,
    write_run,
)

from ms_parallel import CheckpointError, DistributedTrainer, LaunchError, ModelError, checkpoint
from ms_parallel.checkpoint.background import BackgroundSaver
from ms_parallel.errors import DamageError, DivergenceError, FolderError
from ms_parallel.files import durable
from ms_parallel.files.durable import write_file
from ms_parallel.files.run_folder import locked
from ms_parallel.training.checkpoints import RunProgress
from ms_parallel.training.recovery import check_outcome
from ms_parallel.training.result import write_model
from ms_parallel.weights.folder import WeightFolder


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards built by one short run."""
    run = write_run(
        tmp_path_factory.mktemp("build") / "run.toml",
        write_corpus(tmp_path_factory.mktemp("data") / "corpus"),
        steps=1,
    )
    assert train(run, 1).returncode == 0
    return run.with_suffix("") / "shards"


def writer_of(process: int) -> int:
    """The process that writes checkpoints for a training process; 0 if it does not exist."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError):
            continue
        if b"writing_process" in line and parent == process:
            return int(entry.name)
    return 0


def test_a_stopped_checkpoint_writer_ends_the_run_and_is_named(
    shards: Path, tmp_path: Path
) -> None:
    """After SIGSTOP of the writer, the run exits with 1 and names its rank instead of hanging."""
    run = write_run(
        tmp_path / "run.toml",
        shards,
        steps=100_000,
        checkpoint_every=3,
        async_checkpoints=True,
        timeout_s=4.0,
    )
    with training(run, 1) as started:
        wait_for(lambda: checkpoints(run), started)
        writer = writer_of(started.pid)
        assert writer
        signal_process(writer, signal.SIGSTOP)
        assert started.wait(120) == 1
    log = run.with_suffix(".log").read_text()
    assert "rank 0: the process that writes checkpoints made no progress for" in log
    assert "Traceback" not in log
    assert not Path(f"/proc/{writer}").exists()


def test_a_full_disk_during_a_background_save_is_reported_as_such(tmp_path: Path) -> None:
    """A file size limit makes a write fail."""
    saver = BackgroundSaver(tmp_path / "checkpoints", KEPT)
    saver.save(1, state_of(1), facts={}, note=lambda: None)
    saver.finish()
    assert saver.process is not None
    limit = "import resource, sys; resource.prlimit(int(sys.argv[1]), 1, (900, 900))"
    subprocess.run(
        [sys.executable, "-c", limit, str(saver.process._process.pid)], check=True, timeout=60
    )
    saver.save(2, state_of(2), facts={}, note=lambda: None)
    with pytest.raises(CheckpointError, match=r"File too large; free some space"):
        saver.finish()
    saver.close()
    assert checkpoint.all_steps(tmp_path / "checkpoints") == [1]


def test_a_background_save_on_a_full_file_system_ends_with_exit_code_2(
    shards: Path, tmp_path: Path
) -> None:
    """On a tmpfs of 300 kB; the one line names the full disk."""
    small = tmp_path / "small"
    small.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small)]
    if mount is None or subprocess.run([mount, *options], capture_output=True).returncode:
        pytest.skip("needs root and a mount namespace that allows tmpfs")
    try:
        run = write_run(
            tmp_path / "run.toml",
            shards,
            output_dir=str(small / "run"),
            checkpoint_every=1,
            async_checkpoints=True,
        )
        result = train(run, 1)
    finally:
        subprocess.run(["umount", str(small)], check=True, timeout=60)
    assert result.returncode == 2, result.stderr
    assert "No space left on device; free some space" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_diverged_run_exits_1_and_writes_no_model(shards: Path, tmp_path: Path) -> None:
    """The same holds when the command is run again."""
    run = write_run(tmp_path / "run.toml", shards, steps=10, learning_rate=1e9, progress=False)
    for _ in range(2):
        result = train(run, 1)
        assert result.returncode == 1, result.stdout
        assert re.search(r"step 10: \d+ of 10 steps were skipped, so no model", result.stderr)
        assert not (run.with_suffix("") / "model").exists()
    ends = events(run, "end")
    assert [event["finished"] for event in ends] == [0, 0]
    skipped = int(re.findall(r"(\d+) of 10 steps were skipped", result.stderr)[0])
    assert [(event["skipped"], event["rolled_back"]) for event in ends] == [(skipped, 0)] * 2


@pytest.mark.parametrize(
    ("facts", "performed", "problem"),
    [
        ({"loss": 2.0, "held_out_loss": float("nan")}, 10, "the held-out loss is nan"),
        ({"loss": None}, 10, "the loss of the last step is not finite"),
        ({"loss": 2.0, "skipped": {"nonfinite": 6}}, 4, "6 of 10 steps were skipped"),
        ({"loss": 2.0, "skipped": {"overflow": 10}}, 0, "10 of 10 steps were skipped"),
    ],
)
def test_success_needs_finite_losses_and_performed_steps(
    facts: dict[str, object], performed: int, problem: str
) -> None:
    """Overflows of float16 do not fail a run if some steps were performed."""
    with pytest.raises(DivergenceError, match=problem):
        check_outcome(RunProgress(**facts), 10, performed)  # type: ignore[arg-type]
    check_outcome(RunProgress(loss=2.0, skipped={"overflow": 9}), 10, 1)


def test_warnings_do_not_depend_on_the_progress_setting(shards: Path, tmp_path: Path) -> None:
    """A damaged checkpoint is reported on standard error even with progress=false."""
    run = write_run(tmp_path / "run.toml", shards, progress=False)
    assert train(run, 1).returncode == 0
    path = run.with_suffix("") / "checkpoints" / "step-00000012" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    result = train(run, 1)
    assert (result.returncode, result.stdout) == (0, "")
    assert "step-00000012/rank-00000.safetensors" in result.stderr


def test_a_checkpoint_with_a_wrong_data_position_is_skipped(shards: Path, tmp_path: Path) -> None:
    """With a valid checksum it would otherwise train a different model."""
    run = write_run(tmp_path / "run.toml", shards)
    assert train(run, 1).returncode == 0
    folder = run.with_suffix("") / "checkpoints" / "step-00000012"
    manifest = checkpoint.read_manifest(folder)
    assert manifest.facts["stream"]["consumed_samples"] == manifest.facts["standing"]["samples"]
    manifest.facts["stream"]["consumed_samples"] += 4
    (folder / "checkpoint.json").write_bytes(manifest.encode())
    result = train(run, 1)
    assert result.returncode == 0
    assert "checkpoint.json: the data position is after" in result.stderr
    assert [event["step"] for event in events(run, "damaged_checkpoint")] == [12]
    rewritten = checkpoint.read_manifest(folder)
    assert rewritten.facts["stream"]["consumed_samples"] == rewritten.facts["standing"]["samples"]


def test_a_pipe_in_place_of_a_weight_file_is_refused(tmp_path: Path) -> None:
    """Opening it would wait forever for a writer."""
    os.mkfifo(tmp_path / "x.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "x.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"x\.safetensors: not a file"):
        WeightFolder(tmp_path).shape("a")


def test_a_pipe_in_place_of_a_checkpoint_file_is_refused(tmp_path: Path) -> None:
    """It counts as damage, so a run falls back to the previous checkpoint."""
    state = state_of(1)
    checkpoint.save(tmp_path / "one", state, step=1, facts={})
    path = tmp_path / "one" / "rank-00000.safetensors"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamageError, match="not a file"):
        checkpoint.load(tmp_path / "one", checkpoint.read_manifest(tmp_path / "one"), state)


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    """Neither the lock nor a temporary file overwrites the target of a symbolic link."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "lock").symlink_to(victim)
    with (
        pytest.raises(FolderError, match="lock is a symbolic link"),
        locked(tmp_path / "lock", resource="a folder"),
    ):
        pass
    (tmp_path / "file.partial").symlink_to(victim)
    write_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert not (tmp_path / "file").is_symlink()
    assert victim.read_text() == "precious"


def killed_at(event: int, work: Callable[[], object]) -> bool:
    """Run `work` in a forked process that kills itself at its n-th file operation.

    Returns whether it was killed; otherwise it had fewer operations.
    """
    child = os.fork()
    if child == 0:
        remaining = iter(range(event))

        def kill(name: str, _: object) -> None:
            if (
                name.startswith(("open", "os.", "shutil.", "ctypes."))
                and next(remaining, None) is None
            ):
                signal.raise_signal(signal.SIGKILL)

        sys.addaudithook(kill)
        work()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
def test_replacing_a_model_survives_a_kill_at_any_file_operation(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has the old or the new model; without renameat2, `restore_folder` repairs it."""
    if not exchanges:
        monkeypatch.setattr(durable, "_exchange", lambda source, target: False)
    folder = tmp_path / "model"

    def write(version: bytes) -> None:
        def save(target: Path) -> None:
            target.mkdir()
            for name in "ab":
                (target / name).write_bytes(version)

        write_model(folder, lambda: version, save)

    kills = 0
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        write(b"old")
        killed = killed_at(kills, lambda: write(b"new"))
        if not exchanges:
            durable.restore_folder(folder)
        contents = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert contents in [dict.fromkeys(("a", "b", "training.json"), v) for v in (b"old", b"new")]
        write(b"last")
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        assert (folder / "a").read_bytes() == b"last"
        if not killed:
            break
        kills += 1
    assert kills > 10


def test_a_rank_that_loses_rank_0_and_its_store_prints_one_line(
    shards: Path, tmp_path: Path
) -> None:
    """Without torchrun, rank 0 holds the store; it is killed with SIGKILL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    run = write_run(tmp_path / "run.toml", shards, steps=100_000, timeout_s=20.0)
    command = [sys.executable, "-m", "ms_parallel", "train", str(run)]
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(
                RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
            ),
        )
        for rank in range(2)
    ]
    with ranks[0] as first, ranks[1] as second:  # closes their pipes
        try:
            wait_for(lambda: checkpoints(run), first)  # type: ignore[arg-type]
            first.kill()
            _, stderr = second.communicate(timeout=120)
        finally:
            for process in ranks:
                process.kill()
    assert second.returncode == 1
    lines = [line for line in stderr.splitlines() if line.startswith("ms-parallel: ")]
    assert len(lines) == 1, stderr
    assert "rank 1 lost contact with rank 0's machine (127.0.0.1:" in lines[0]


def test_a_trainer_refuses_world_size_without_an_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """WORLD_SIZE without MASTER_ADDR must not start a single-process run."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for variables in ({"RANK": "0"}, {}):
        monkeypatch.delenv("RANK", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(LaunchError, match="WORLD_SIZE is 2 without"):
            DistributedTrainer("llama", output_dir=tmp_path / "run").train(tmp_path, steps=1)
