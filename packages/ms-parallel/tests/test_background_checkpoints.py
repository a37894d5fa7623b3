"""Background checkpoints are complete or absent after any failure."""

import os
import random
import resource
import signal
from pathlib import Path
from time import monotonic

import pytest
import torch
from background_runs import KEPT, STEPS, saves, state_of
from processes import run_processes

from ms_parallel import CheckpointError, checkpoint
from ms_parallel.checkpoint import shared_memory
from ms_parallel.checkpoint.background import BackgroundSaver
from ms_parallel.cluster.connection import disconnect

RUNS = Path(__file__).parent / "background_runs.py"


@pytest.fixture(autouse=True)
def disconnect_first() -> None:
    """Disconnect the process group of an earlier test."""
    disconnect()


def read_reported_steps(root: Path) -> list[int]:
    """Steps that were reported as saved."""
    path = root / "reported"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def check(root: Path, world: int = 1) -> list[int]:
    """Check that complete checkpoints load correctly and include the reported ones."""
    checkpoint.sweep(root / "checkpoints")
    complete = checkpoint.complete_steps(root / "checkpoints")
    assert checkpoint.all_steps(root / "checkpoints") == complete
    for step in complete:
        folder = checkpoint.step_folder(root / "checkpoints", step)
        manifest = checkpoint.read_manifest(folder)
        assert (manifest.step, manifest.facts) == (step, {"step": step})
        expected = state_of(step)
        for rank in range(world):
            expected[f"model.stage-{rank}"] = torch.arange(100).double() * step
        loaded = {name: torch.full_like(tensor, 7) for name, tensor in expected.items()}
        checkpoint.load(folder, manifest, loaded)
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    if reported_steps := read_reported_steps(root):
        assert complete
        assert complete[-1] >= reported_steps[-1]
        assert {step for step in reported_steps if step > complete[-1] - KEPT} <= set(complete)
    return complete


def points(tmp_path: Path) -> int:
    """Number of writes, syncs and renames in three checkpoints."""
    root = tmp_path / "whole"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "PROGRAM", shared_memory.PROGRAM)
        assert saves(str(root), "nothing", 0) == ""
    assert read_reported_steps(root) == list(STEPS)
    assert check(root) == list(STEPS[-KEPT:])
    return int((root / "points").read_text())


def sample(count: int, slow: bool) -> list[int]:
    """All points, or a random few."""
    all_points = list(range(1, count + 1))
    return all_points if slow else sorted(random.Random(4).sample(all_points, 5))


SLOW = [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("failure", ["kill", "full"])
def test_a_failed_writer_never_commits_and_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str, slow: bool
) -> None:
    """Killed or out of space at any write, sync or rename; reported checkpoints are there."""
    monkeypatch.setattr(shared_memory, "PROGRAM", shared_memory.PROGRAM)
    count = points(tmp_path)
    assert count > 30
    for point in sample(count, slow):
        root = tmp_path / str(point)
        root.mkdir()
        message = saves(str(root), failure, point)
        assert ("signal 9" if failure == "kill" else "No space left on device") in message, point
        check(root)
        assert read_reported_steps(root) != list(STEPS) or message


@pytest.mark.parametrize("slow", SLOW)
def test_a_killed_rank_leaves_reported_checkpoints(tmp_path: Path, slow: bool) -> None:
    """Killed with its writer at any of the writer's writes, syncs and renames."""
    for point in sample(points(tmp_path), slow):
        root = tmp_path / str(point)
        root.mkdir()
        (result,) = run_processes(
            1, RUNS, "saves", folder=str(root), failure="kill both", point=point, check=False
        )
        assert result["code"] == -signal.SIGKILL
        check(root)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_of_one_rank_is_raised_on_all(tmp_path: Path, rank: int) -> None:
    """With the same message; the previous checkpoint is complete on both."""
    messages = run_processes(
        2, RUNS, "saves", folder=str(tmp_path), failure="full", point=12, rank=rank, world=2
    )
    assert messages[0] == messages[1]
    assert "No space left on device" in messages[0]
    check(tmp_path, world=2)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_background_checkpoint_equals_a_blocking_one(tmp_path: Path, count: int) -> None:
    """Boxes, checksums and facts of sharded states and of stages, at two steps."""
    layouts = {2: ("data=2", "pipeline=2"), 4: ("data=2,tensor=2", "data=2,pipeline=2")}[count]
    for layout in layouts:
        folder = tmp_path / layout
        differences = run_processes(count, RUNS, "both_ways", layout=layout, folder=str(folder))
        assert differences == [[]] * count


def test_a_write_error_is_reported(tmp_path: Path) -> None:
    """With a file in place of the folder, the next wait raises the error."""
    (tmp_path / "checkpoints").write_text("a file")
    saver = BackgroundSaver(tmp_path / "checkpoints", KEPT)
    saver.save(1, state_of(1), facts={}, note=lambda: None)
    with pytest.raises(CheckpointError, match=r"cannot write .*step-00000001: "):
        saver.finish()


def test_saves_run_one_at_a_time_and_share_their_memory(tmp_path: Path) -> None:
    """A second save waits for the first and reuses its memory."""
    saver, saved = BackgroundSaver(tmp_path, 9), []
    for step in STEPS:
        saver.save(step, state_of(step), facts={"step": step}, note=lambda s=step: saved.append(s))
        assert saved == list(range(1, step))
        size = os.fstat(saver.memory.descriptor).st_size
        assert size == sum(saver.rank_plan.part_bytes)  # type: ignore[union-attr]
    saver.finish()
    assert saved == list(STEPS)
    process = saver.process
    saver.close()
    assert process is not None
    assert process._process.returncode == -signal.SIGKILL


def test_the_writer_ends_with_its_parent(tmp_path: Path) -> None:
    """So it cannot write into a folder that a new run may use."""
    note = tmp_path / "pid"
    (result,) = run_processes(1, RUNS, "start_and_die", note=str(note), check=False)
    assert result["code"] == -signal.SIGKILL
    deadline = monotonic() + 10  # immediate unless the machine is busy
    while Path(f"/proc/{note.read_text()}").exists() and monotonic() < deadline:
        pass
    assert not Path(f"/proc/{note.read_text()}").exists()


def test_lack_of_memory_for_the_copy_is_reported(tmp_path: Path) -> None:
    """The next poll raises, as all ranks must agree; no checkpoint appears."""
    saver = BackgroundSaver(tmp_path, KEPT)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        saver.save(1, state_of(1), facts={}, note=lambda: None)
        with pytest.raises(CheckpointError, match=r"no memory for a copy of .* bytes: File too"):
            saver.poll()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert checkpoint.all_steps(tmp_path) == []
