"""A run's folder belongs to one run: held while it works, sealed for as long as it lies."""

import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from ms_parallel.errors import FolderError
from ms_parallel.run_folder import Change, hold, inside, owner_of

SETTINGS = {"learning_rate": 1e-3, "batch_size": 8}


def begin(folder: Path, **changes: Any) -> AbstractContextManager[list[Change]]:
    """Hold a folder as a training does."""
    words: dict[str, Any] = {
        "kind": "ms-parallel train",
        "identity": {"model": "llama", "dataset": "corpus"},
        "settings": SETTINGS,
        "fixed": ("batch_size",),
        "writes": ("model", "checkpoints"),
    }
    return hold(folder, **(words | changes))


HOLD_FOR_EVER = """
import pathlib, signal, sys
from ms_parallel.run_folder import hold
with hold(pathlib.Path(sys.argv[1]), kind="ms-parallel train",
          identity={"model": "llama", "dataset": "corpus"}, settings={}):
    print("held", flush=True)
    signal.pause()
"""


def test_the_same_run_comes_back_and_is_told_nothing_new(tmp_path: Path) -> None:
    """The same settings change nothing, and the seal keeps the moment when the run began."""
    with begin(tmp_path / "run") as changes:
        assert changes == []
    first = owner_of(tmp_path / "run")
    with begin(tmp_path / "run") as changes:
        assert changes == []
    assert owner_of(tmp_path / "run") == first


def test_changed_settings_are_told_and_kept(tmp_path: Path) -> None:
    """A setting that may change is named with both values, once."""
    with begin(tmp_path):
        pass
    for expected in (["learning_rate is 0.01, was 0.001"], []):
        with begin(tmp_path, settings=SETTINGS | {"learning_rate": 1e-2}) as changes:
            assert [str(change) for change in changes] == expected


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kind": "ms-align ppo"}, r"belongs to 'ms-parallel train', begun .* 'ms-align ppo'"),
        ({"identity": {"model": "qwen3", "dataset": "corpus"}}, 'model is "llama".*"qwen3"'),
        ({"settings": SETTINGS | {"batch_size": 16}}, "batch_size is 16, was 8"),
    ],
)
def test_another_run_is_refused_and_nothing_is_written(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    """Another kind, model or fixed setting is no resume; the owner is named."""
    with begin(tmp_path):
        pass
    before = owner_of(tmp_path)
    with pytest.raises(FolderError, match=told), begin(tmp_path, **changes):
        pass
    assert owner_of(tmp_path) == before


def test_a_folder_with_results_and_no_seal_is_somebody_elses(tmp_path: Path) -> None:
    """A model that lies where this run would write its own stays; other files do no harm."""
    (tmp_path / "notes.txt").write_text("mine")
    with begin(tmp_path):
        pass
    (tmp_path / "other" / "model").mkdir(parents=True)
    with pytest.raises(FolderError, match="holds 'model'"), begin(tmp_path / "other"):
        pass
    assert owner_of(tmp_path / "other") is None


def test_every_flipped_byte_of_a_seal_is_seen(tmp_path: Path) -> None:
    """A seal that is not what was written is never believed, nor taken for none."""
    with begin(tmp_path):
        pass
    path = tmp_path / "run.json"
    sound = path.read_bytes()
    for place in range(len(sound)):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        with pytest.raises(FolderError, match="whose folder it is cannot be told"):
            owner_of(tmp_path)


def test_a_held_folder_names_its_holder_and_is_free_after_kill(tmp_path: Path) -> None:
    """Two processes never work in one folder; one that is killed with -9 lets go."""
    command = [sys.executable, "-c", HOLD_FOR_EVER, str(tmp_path)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(FolderError, match=f"in use by .*process {other.pid} on"), begin(tmp_path):
        pass
    notes: list[str] = []

    def kill(line: str) -> None:
        notes.append(line)
        other.kill()

    with begin(tmp_path, settings={}, wait_s=30.0, note=kill):
        pass
    other.wait()
    assert len(notes) == 1
    assert f"process {other.pid}" in notes[0]


def test_what_lies_inside_is_found_through_links(tmp_path: Path) -> None:
    """A model that is read from the folder that a run writes is known for what it is."""
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert inside(tmp_path / "link" / "model", tmp_path / "run")
    assert not inside(tmp_path / "running", tmp_path / "run")
