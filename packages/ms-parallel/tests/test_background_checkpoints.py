"""Checkpoints that a process writes beside the training: complete, or none, whatever happens."""

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
def alone() -> None:
    """No group is left of an earlier test, whose state would not be this one's."""
    disconnect()


def reported(root: Path) -> list[int]:
    """Steps that were said to be saved."""
    path = root / "reported"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def check(root: Path, world: int = 1) -> list[int]:
    """All complete checkpoints open and hold what they should; the reported ones are there."""
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
        found = {name: torch.full_like(tensor, 7) for name, tensor in expected.items()}
        checkpoint.load(folder, manifest, found)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    if said := reported(root):
        assert complete
        assert complete[-1] >= said[-1]
        assert {step for step in said if step > complete[-1] - KEPT} <= set(complete)
    return complete


def points(tmp_path: Path) -> int:
    """How many writes, syncs and renames three checkpoints are."""
    root = tmp_path / "whole"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "PROGRAM", shared_memory.PROGRAM)
        assert saves(str(root), "nothing", 0) == ""
    assert reported(root) == list(STEPS)
    assert check(root) == list(STEPS[-KEPT:])
    return int((root / "points").read_text())


def sample(count: int, slow: bool) -> list[int]:
    """Every one of them, or some."""
    every = list(range(1, count + 1))
    return every if slow else sorted(random.Random(4).sample(every, 5))


SLOW = [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("how", ["kill", "full"])
def test_a_writer_that_fails_never_commits_and_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, slow: bool
) -> None:
    """Killed, or without space, at any write, sync or rename: what was reported is there."""
    monkeypatch.setattr(shared_memory, "PROGRAM", shared_memory.PROGRAM)
    count = points(tmp_path)
    assert count > 30
    for point in sample(count, slow):
        root = tmp_path / str(point)
        root.mkdir()
        said = saves(str(root), how, point)
        assert ("signal 9" if how == "kill" else "No space left on device") in said, point
        check(root)
        assert reported(root) != list(STEPS) or said


@pytest.mark.parametrize("slow", SLOW)
def test_a_rank_that_is_killed_leaves_what_was_reported(tmp_path: Path, slow: bool) -> None:
    """With its writer, at any of the writer's writes, syncs and renames."""
    for point in sample(points(tmp_path), slow):
        root = tmp_path / str(point)
        root.mkdir()
        (found,) = run_processes(
            1, RUNS, "saves", folder=str(root), how="kill both", point=point, check=False
        )
        assert found["code"] == -signal.SIGKILL
        check(root)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_of_one_rank_is_raised_on_all(tmp_path: Path, rank: int) -> None:
    """In the words of the one that failed; the checkpoint before is complete on both."""
    said = run_processes(
        2, RUNS, "saves", folder=str(tmp_path), how="full", point=12, rank=rank, world=2
    )
    assert said[0] == said[1]
    assert "No space left on device" in said[0]
    check(tmp_path, world=2)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_checkpoint_is_the_one_that_would_block(tmp_path: Path, count: int) -> None:
    """Boxes, checksums and facts of a sharded state and of stages, at two steps of training."""
    layouts = {2: ("data=2", "pipeline=2"), 4: ("data=2,tensor=2", "data=2,pipeline=2")}[count]
    for layout in layouts:
        folder = tmp_path / layout
        found = run_processes(count, RUNS, "both_ways", layout=layout, folder=str(folder))
        assert found == [[]] * count


def test_a_disk_that_refuses_is_told_as_it_is(tmp_path: Path) -> None:
    """A file in the place of the folder; the process that waited raises at its next question."""
    (tmp_path / "checkpoints").write_text("a file")
    saver = BackgroundSaver(tmp_path / "checkpoints", KEPT)
    saver.save(1, state_of(1), facts={}, note=lambda: None)
    with pytest.raises(CheckpointError, match=r"cannot write .*step-00000001: "):
        saver.finish()


def test_one_is_on_its_way_at_a_time_and_the_copy_is_kept(tmp_path: Path) -> None:
    """A second save waits for the first; the memory of the first serves it too."""
    saver, noted = BackgroundSaver(tmp_path, 9), []
    for step in STEPS:
        saver.save(step, state_of(step), facts={"step": step}, note=lambda s=step: noted.append(s))
        assert noted == list(range(1, step))
        size = os.fstat(saver.memory.descriptor).st_size
        assert size == sum(saver.rank_plan.part_bytes)  # type: ignore[union-attr]
    saver.finish()
    assert noted == list(STEPS)
    process = saver.process
    saver.close()
    assert process is not None
    assert process._process.returncode == -signal.SIGKILL


def test_the_writer_ends_with_whoever_started_it(tmp_path: Path) -> None:
    """Though nobody tells it: nothing writes in a folder that a new run may hold."""
    note = tmp_path / "pid"
    (found,) = run_processes(1, RUNS, "start_and_die", note=str(note), check=False)
    assert found["code"] == -signal.SIGKILL
    deadline = monotonic() + 10  # in an instant, where the machine is not busy
    while Path(f"/proc/{note.read_text()}").exists() and monotonic() < deadline:
        pass
    assert not Path(f"/proc/{note.read_text()}").exists()


def test_a_rank_without_memory_for_the_copy_is_told(tmp_path: Path) -> None:
    """At the next question, as all ranks are to hear of it; nothing gets a name."""
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
