"""Folders appear atomically and have a single writer, despite kills and concurrent runs."""

import fcntl
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import die, die_at_change, exit_status, fork
from models import decoder

from ms_compress import ExportError, export, qat
from ms_compress.files.durable import replace, writing
from ms_compress.output_lock import new_folder, output_lock


def run_forked(act: Callable[[], object]) -> int:
    """Run a function in a forked process; return its status."""
    return exit_status(fork(act))


def test_a_folder_has_one_writer_at_a_time(tmp_path: Path) -> None:
    """Another is refused immediately, in this or another process; the first one's files stay."""
    out = tmp_path / "out"

    def second_writer() -> None:
        with new_folder(out) as temporary:
            (temporary / "theirs").touch()

    with new_folder(out) as temporary:
        (temporary / "mine").touch()
        assert run_forked(second_writer) == 1
        with pytest.raises(ExportError, match="is being written by process"):
            second_writer()
        assert run_forked(lambda: export(qat(decoder(1), "ct.int4_g32"), out)) == 1
    assert [path.name for path in out.iterdir()] == ["mine"]
    assert list(tmp_path.iterdir()) == [out]
    with pytest.raises(ExportError, match="out exists; remove it"):
        second_writer()


def test_a_killed_writers_leftovers_do_not_block(tmp_path: Path) -> None:
    """Its lock is free, and its files are removed."""
    out = tmp_path / "out"

    def killed_writer() -> None:
        with new_folder(out) as temporary:
            (temporary / "half").touch()
            die()

    assert run_forked(killed_writer) == -signal.SIGKILL
    assert not out.exists()
    with new_folder(out) as temporary:
        (temporary / "complete").touch()
    assert [path.name for path in out.iterdir()] == ["complete"]
    assert list(tmp_path.iterdir()) == [out]


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_writer_killed_at_any_change_leaves_the_old_folder_or_the_new_one(
    tmp_path: Path,
) -> None:
    """Never none or part of one, which would still open; the next writer completes."""
    out = tmp_path / "out"
    names = ("config.json", "model.safetensors", "tokenizer.json")

    def write(text: str, kill_at: int | None = None) -> None:
        if kill_at is not None:
            die_at_change(kill_at)
        with new_folder(out, overwrite=True) as temporary:
            for name in names:
                (temporary / name).write_text(text)

    states = []
    for number in range(100):
        write("old")
        status = run_forked(lambda number=number: write("new", number))
        states.append(contents(out))
        write("newest")
        assert contents(out) == dict.fromkeys(names, b"newest")
        assert list(tmp_path.iterdir()) == [out]
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert status == 0
    assert [state for index, state in enumerate(states) if state not in states[:index]] == [
        dict.fromkeys(names, b"old"),
        dict.fromkeys(names, b"new"),
    ]


@pytest.mark.parametrize("target", ["ct.int4_g32", "gguf.q4_0", "ort.matmulnbits"])
def test_an_export_killed_midway_leaves_the_old_or_the_new_one(target: str, tmp_path: Path) -> None:
    """Killed at every third file operation, while it replaces another model's export."""
    old, new = (qat(decoder(seed), target) for seed in (1, 2))
    out = tmp_path / "out"
    export(new, tmp_path / "expected")
    expected = contents(tmp_path / "expected")
    export(old, out)
    old_contents = contents(out)

    def export_until_killed(number: int) -> None:
        die_at_change(number)
        export(new, out, overwrite=True)

    outcomes = set()
    for number in range(0, 300, 3):
        status = run_forked(lambda number=number: export_until_killed(number))
        current = contents(out)
        assert current in (old_contents, expected)
        outcomes.add(status)
        if current != old_contents:
            export(new, out, overwrite=True)
            assert contents(out) == expected
            export(old, out, overwrite=True)
        if status == 0:
            break
    assert outcomes == {0, -signal.SIGKILL}
    assert {path.name for path in tmp_path.iterdir()} == {"expected", "out"}


def test_a_lock_on_a_removed_file_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder ended between open and flock here; other processes will use the new file."""
    out, lock, original_flock = tmp_path / "out", tmp_path / "out.lock", fcntl.flock

    def remove_then_lock(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", original_flock)
        lock.unlink()
        original_flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_then_lock)
    with output_lock(out):
        with pytest.raises(ExportError, match="is being written by process"), output_lock(out):
            pass
        assert lock.is_file()
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    """The error has the reason, which `torch.save` hides; the old file stays."""
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


def test_a_write_error_without_errno_mentions_a_full_disk(tmp_path: Path) -> None:
    """Numpy raises such an error when only part of an array is written."""
    expected_error = pytest.raises(
        ExportError, match="1024 requested and 0 written; the disk may be full"
    )
    with (
        expected_error,
        writing(tmp_path / "out"),
        Path("/dev/full").open("wb", buffering=0) as file,
    ):
        np.zeros(1024).tofile(file)
