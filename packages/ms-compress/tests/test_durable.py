"""Folders that appear whole, of one writer, whatever is killed or run twice."""

import fcntl
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import die, die_at_change, ended, started
from models import decoder

from ms_compress import ExportError, export, qat
from ms_compress.files.durable import replace, writing
from ms_compress.output_lock import new_folder, output_lock


def forked(act: Callable[[], object]) -> int:
    """The status of a process that does this."""
    return ended(started(act))


def test_a_folder_has_one_writer_at_a_time(tmp_path: Path) -> None:
    """Another is refused at once, in this process or another one; what the first writes stays."""
    out = tmp_path / "out"

    def second() -> None:
        with new_folder(out) as aside:
            (aside / "theirs").touch()

    with new_folder(out) as aside:
        (aside / "mine").touch()
        assert forked(second) == 1
        with pytest.raises(ExportError, match="is being written by process"):
            second()
        assert forked(lambda: export(qat(decoder(1), "ct.int4_g32"), out)) == 1
    assert [path.name for path in out.iterdir()] == ["mine"]
    assert list(tmp_path.iterdir()) == [out]
    with pytest.raises(ExportError, match="out exists; remove it"):
        second()


def test_what_a_killed_writer_left_is_no_obstacle(tmp_path: Path) -> None:
    """Its lock is open, and its files go."""
    out = tmp_path / "out"

    def killed() -> None:
        with new_folder(out) as aside:
            (aside / "half").touch()
            die()

    assert forked(killed) == -signal.SIGKILL
    assert not out.exists()
    with new_folder(out) as aside:
        (aside / "whole").touch()
    assert [path.name for path in out.iterdir()] == ["whole"]
    assert list(tmp_path.iterdir()) == [out]


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_writer_killed_at_any_change_leaves_the_old_folder_or_the_new_one(
    tmp_path: Path,
) -> None:
    """Never none, nor part of one, which would still open; the next writer completes."""
    out = tmp_path / "out"
    names = ("config.json", "model.safetensors", "tokenizer.json")

    def write(text: str, kill_at: int | None = None) -> None:
        if kill_at is not None:
            die_at_change(kill_at)
        with new_folder(out, overwrite=True) as aside:
            for name in names:
                (aside / name).write_text(text)

    states = []
    for number in range(100):
        write("old")
        status = forked(lambda number=number: write("new", number))
        states.append(contents(out))
        write("newest")
        assert contents(out) == dict.fromkeys(names, b"newest")
        assert list(tmp_path.iterdir()) == [out]
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert status == 0
    assert [state for at, state in enumerate(states) if state not in states[:at]] == [
        dict.fromkeys(names, b"old"),
        dict.fromkeys(names, b"new"),
    ]


@pytest.mark.parametrize("target", ["ct.int4_g32", "gguf.q4_0", "ort.matmulnbits"])
def test_an_export_killed_midway_is_the_old_one_or_the_new_one_and_completes_again(
    target: str, tmp_path: Path
) -> None:
    """Killed before every third change of files, while it replaces an export of another model."""
    old, new = (qat(decoder(seed), target) for seed in (1, 2))
    out = tmp_path / "out"
    export(new, tmp_path / "expected")
    expected = contents(tmp_path / "expected")
    export(old, out)
    before = contents(out)

    def killed(number: int) -> None:
        die_at_change(number)
        export(new, out, overwrite=True)

    outcomes = set()
    for number in range(0, 300, 3):
        status = forked(lambda number=number: killed(number))
        found = contents(out)
        assert found in (before, expected)
        outcomes.add(status)
        if found != before:
            export(new, out, overwrite=True)
            assert contents(out) == expected
            export(old, out, overwrite=True)
        if status == 0:
            break
    assert outcomes == {0, -signal.SIGKILL}
    assert {path.name for path in tmp_path.iterdir()} == {"expected", "out"}


def test_a_lock_whose_name_was_removed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder ended between its opening here and its taking; others will ask by the name."""
    out, lock, take = tmp_path / "out", tmp_path / "out.lock", fcntl.flock

    def late(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", take)
        lock.unlink()
        take(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with output_lock(out):
        with pytest.raises(ExportError, match="is being written by process"), output_lock(out):
            pass
        assert lock.is_file()
    assert not list(tmp_path.iterdir())


def test_a_file_that_the_disk_refuses_leaves_nothing_aside(tmp_path: Path) -> None:
    """`torch.save` hides the reason in an error of its own; the file before stays as it was."""
    path = tmp_path / "out.training"
    replace(path, lambda file: file.write(b"before"))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        with pytest.raises(ExportError, match=r"out\.training: File too large"):
            replace(path, lambda file: torch.save(torch.zeros(100_000), file))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_refusal_without_a_number_is_told_as_a_full_disk_may_be(tmp_path: Path) -> None:
    """So says numpy when a disk takes a part of an array."""
    told = pytest.raises(ExportError, match="1024 requested and 0 written; the disk may be full")
    with told, writing(tmp_path / "out"), Path("/dev/full").open("wb", buffering=0) as file:
        np.zeros(1024).tofile(file)
