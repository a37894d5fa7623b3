"""The command line: output, exit codes, and one line per user mistake."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ms_data
from ms_data import inspect, progress
from ms_data.cli import main

from .test_build import random_texts, write_lines


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a corpus, a tokenizer and shards built by the command."""
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "corpus.jsonl", random_texts(1, 60))
    assert main(["tokenizer", "corpus.jsonl", "--vocab-size", "300", "--out", "t.json"]) == 0
    build = ["build", "corpus.jsonl", "--tokenizer", "t.json", "--out", "shards"]
    assert main([*build, "--held-out-fraction", "0.2"]) == 0
    return tmp_path


def test_the_four_commands_exit_0_and_print_a_summary(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tokenizer", "corpus.jsonl", "--vocab-size", "290", "--out", "u.json"]) == 0
    assert capsys.readouterr().out == "u.json: 290 tokens\n"
    assert main(["build", "corpus.jsonl", "--tokenizer", "u.json", "--out", "again"]) == 0
    assert capsys.readouterr().out.startswith("again: 60 documents, ")
    assert main(["inspect", "shards"]) == 0
    assert "held_out" in capsys.readouterr().out
    assert main(["verify", "shards"]) == 0
    assert "are intact" in capsys.readouterr().out


def test_json_output_matches_the_python_api(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["inspect", "shards", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["fingerprint"] == inspect("shards").fingerprint
    assert main(["verify", "shards", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["faults"] == []
    build = ["build", "corpus.jsonl", "--tokenizer", "t.json", "--out", "more", "--json"]
    assert main(build) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 60


def test_verify_exits_1_and_names_file_and_frame(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = workspace / "shards" / "shard-00000.msd"
    content = bytearray(shard.read_bytes())
    content[30] ^= 4
    shard.write_bytes(content)
    capsys.readouterr()
    assert main(["verify", "shards"]) == 1
    assert "shard-00000.msd: frame 0: checksum mismatch" in capsys.readouterr().out
    assert main(["verify", "shards", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["faults"][0]["part"] == "frame 0"
    (workspace / "shards" / "index.json").write_bytes(b"{}")
    assert main(["inspect", "shards"]) == 1


BAD: dict[str, tuple[list[str], str]] = {
    "missing corpus": (["build", "nowhere", "--tokenizer", "t.json"], "no file or folder nowhere"),
    "empty folder": (["build", "empty", "--tokenizer", "t.json"], "empty is empty"),
    "no text": (["build", "blank.txt", "--tokenizer", "t.json"], "blank.txt is empty"),
    "not UTF-8": (["build", "latin.txt", "--tokenizer", "t.json"], "byte 0xe9 at offset 3"),
    "bad line": (["build", "bad.jsonl", "--tokenizer", "t.json"], "bad.jsonl:2"),
    "no key": (["build", "corpus.jsonl", "--tokenizer", "t.json", "--text-column", "x"], "`x`"),
    "bad gzip": (["build", "bad.txt.gz", "--tokenizer", "t.json"], "damaged compressed file"),
    "bad zstd": (["build", "bad.txt.zst", "--tokenizer", "t.json"], "damaged compressed file"),
    "no tokenizer": (["build", "corpus.jsonl", "--tokenizer", "latin.txt"], "not a tokenizer"),
    "lost tokenizer": (["build", "corpus.jsonl", "--tokenizer", "no.json"], "no.json: cannot"),
    "hold out": (
        ["build", "corpus.jsonl", "--tokenizer", "t.json", "--held-out-fraction", "2"],
        "held_out_fraction",
    ),
    "end": (["build", "corpus.jsonl", "--tokenizer", "t.json", "--end-of-text", "<x>"], "'<x>'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_to_build_is_one_line_and_exit_2(
    workspace: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """The line names the location, and no output is left."""
    (workspace / "empty").mkdir()
    (workspace / "blank.txt").write_text("")
    (workspace / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (workspace / "bad.jsonl").write_text('{"text": "x"}\nnonsense\n')
    (workspace / "bad.txt.gz").write_bytes(b"not gzip")
    (workspace / "bad.txt.zst").write_bytes(b"\x28\xb5\x2f\xfd cut")
    arguments, text = BAD[case]
    capsys.readouterr()
    assert main([*arguments, "--out", "new"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ms-data: ")
    assert captured.err.count("\n") == 1
    assert text in captured.err
    assert not (workspace / "new").exists()
    assert not (workspace / "new.partial").exists()


def test_other_bad_input_is_one_line_and_exit_2(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Existing output, a tiny vocabulary, a folder without shards, an unwritable path."""
    os.mkfifo(workspace / "pipe")
    for arguments, text in (
        (["build", "corpus.jsonl", "--tokenizer", "t.json", "--out", "shards"], "not empty"),
        (["tokenizer", "corpus.jsonl", "--vocab-size", "9", "--out", "x"], "257"),
        (["tokenizer", "corpus.jsonl", "--out", "no/such/place.json"], "cannot write"),
        (["tokenizer", "corpus.jsonl", "--out", "pipe"], "is not a regular file"),
        (["verify", "."], "no dataset"),
        (["inspect", "nowhere"], "no dataset"),
    ):
        capsys.readouterr()
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert text in error


def test_printing_to_a_full_disk_is_one_line_and_exit_2(workspace: Path) -> None:
    command = [sys.executable, "-m", "ms_data", "inspect", "shards"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "No space left on device" in result.stderr


def test_wrong_arguments_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    """The same status as argparse's own errors."""
    for arguments in ([], ["bild"], ["build", "x"], ["tokenizer", "x", "--vocab-size", "many"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("command", ["tokenizer", "build", "inspect", "verify"])
def test_every_command_has_help_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"example: ms-data {command} " in capsys.readouterr().out.replace("\n", " ")


def test_version_prints_the_package_version(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"ms-data {ms_data.__version__}\n"


def test_rerunning_a_finished_build_has_nothing_to_do(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Changed settings, a changed corpus or damage are refused by name."""
    command = ["build", "corpus.jsonl", "--tokenizer", "t.json", "--out", "shards"]
    before = {path: path.stat().st_mtime_ns for path in (workspace / "shards").iterdir()}
    capsys.readouterr()
    assert main([*command, "--held-out-fraction", "0.2"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("shards: built before, nothing to do: 60 documents, ")
    assert output.count("\n") == 1
    assert main([*command, "--held-out-fraction", "0.2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["built_before"] is True
    assert {path: path.stat().st_mtime_ns for path in (workspace / "shards").iterdir()} == before
    assert main(command) == 2
    assert "another build: held_out_fraction is 0.0, was 0.2; use" in capsys.readouterr().err
    corpus = workspace / "corpus.jsonl"
    corpus.write_bytes(corpus.read_bytes())  # a new mtime, the same content
    assert main([*command, "--held-out-fraction", "0.2"]) == 0
    corpus.write_bytes(corpus.read_bytes().replace(b"e", b"a"))
    capsys.readouterr()
    assert main([*command, "--held-out-fraction", "0.2"]) == 2
    assert "the corpus content changed, possibly in corpus.jsonl" in capsys.readouterr().err
    os.utime(corpus, (1, 1))
    os.truncate(workspace / "shards" / "shard-00000.msd", 50)
    assert main([*command, "--held-out-fraction", "0.2"]) == 2
    assert "shard-00000.msd: damaged: has 50 bytes, but" in capsys.readouterr().err
    (workspace / "shards" / "shard-00000.msd").write_bytes(b"")
    (workspace / "corpus.jsonl").write_text('{"text": "x"}\n')
    assert main([*command, "--held-out-fraction", "0.2"]) == 2
    assert "the corpus has different files or content" in capsys.readouterr().err


def test_skipped_files_are_reported_with_counts(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By build and tokenizer, in text and JSON; a file passed by name is refused."""
    (workspace / "mixed").mkdir()
    (workspace / "mixed" / "a.txt").write_text("some text")
    (workspace / "mixed" / "b.bin").write_bytes(b"a\0b")
    (workspace / "mixed" / "c.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    summary = ", 2 non-text files skipped (1 PNG image, 1 file with NUL bytes)"
    build = ["build", "mixed", "--tokenizer", "t.json", "--out"]
    capsys.readouterr()
    assert main([*build, "one"]) == 0
    assert capsys.readouterr().out.startswith(f"one: 1 documents{summary}, ")
    assert main(["tokenizer", "mixed", "--vocab-size", "300", "--out", "u.json"]) == 0
    assert summary in capsys.readouterr().out
    counts = {"PNG image": 1, "file with NUL bytes": 1}
    for arguments in ([*build, "two"], ["tokenizer", "mixed", "--out", "v.json"]):
        assert main([*arguments, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["left_out"] == counts
    assert main(["build", "mixed/c.png", "--tokenizer", "t.json", "--out", "three"]) == 2
    assert "c.png: PNG image, not text; pass" in capsys.readouterr().err


def test_an_interrupted_command_exits_130_in_one_line(workspace: Path) -> None:
    """A real SIGINT during tokenization."""
    write_lines(workspace / "large.jsonl", random_texts(3, 60_000))
    command = [sys.executable, "-m", "ms_data", "build", "large.jsonl", "--tokenizer", "t.json"]
    # A background job of a shell ignores SIGINT, and its children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [*command, "--out", "new"],
            cwd=workspace,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    while not (workspace / "new.partial" / "shard-00000.msd").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, error.count(b"\n")) == (b"", 1)
    assert error.startswith(b"ms-data: interrupted")


def test_progress_is_a_bar_on_a_terminal(workspace: Path) -> None:
    """The bar goes to standard error; standard output holds only the result."""
    parent_fd, child_fd = pty.openpty()
    command = [sys.executable, "-m", "ms_data", "build", "corpus.jsonl", "--tokenizer", "t.json"]
    result = subprocess.run(
        [*command, "--out", "more"],
        cwd=workspace,
        stdout=subprocess.PIPE,
        stderr=child_fd,
        text=True,
    )
    os.close(child_fd)
    output = os.read(parent_fd, 1 << 16).decode()
    os.close(parent_fd)
    assert "tokenizing" in output
    assert "kB" in output or "bytes" in output
    assert result.stdout.startswith("more: 60 documents")


def test_progress_is_plain_lines_without_a_terminal(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line has percentage, speed and remaining time."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    (workspace / "texts").mkdir()
    for number, text in enumerate(random_texts(2, 9)):
        (workspace / "texts" / f"{number}.txt").write_text(text)
    assert main(["tokenizer", "texts", "--out", "u.json"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 8
    for line in lines:
        assert re.fullmatch(r"reading: \d+% of \d+ MB, [\d.]+ MB/s, \d+ s left", line)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A 256 KiB tmpfs."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small tmpfs can only be mounted by root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_one_line_and_exit_2(workspace: Path, small_disk: Path) -> None:
    """The line names the path, and no partial files stay."""
    write_lines(workspace / "large.jsonl", random_texts(3, 20_000))
    never_saved = (
        "import sys; from ms_data.cli import main;"
        "sys.modules['ms_data.engine.run'].SAVE_EVERY_S = 1e9; sys.exit(main())"
    )
    command = [sys.executable, "-c", never_saved, "build", "large.jsonl", "--tokenizer", "t.json"]
    result = subprocess.run(
        [*command, "--out", str(small_disk / "out")], cwd=workspace, capture_output=True, text=True
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1
    assert "No space left on device" in result.stderr
    assert str(small_disk) in result.stderr
    assert list(small_disk.iterdir()) == []


def test_a_build_stopped_by_a_full_disk_resumes_with_more_space(
    workspace: Path, small_disk: Path
) -> None:
    """It ends in the bytes of an undisturbed build."""
    write_lines(workspace / "large.jsonl", random_texts(3, 20_000))
    script = (
        "import sys; from ms_data.cli import main; modules = sys.modules;"
        "modules['ms_data.engine.run'].SAVE_EVERY_S = 0.0;"
        "modules['ms_data.engine.batches'].BATCH_CHARACTERS = 60_000; sys.exit(main())"
    )
    arguments = ["build", "large.jsonl", "--tokenizer", "t.json", "--out"]
    full = [sys.executable, "-c", script, *arguments, str(small_disk / "out")]
    result = subprocess.run(full, cwd=workspace, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert "the same command resumes there" in result.stderr
    assert [path.name for path in small_disk.iterdir()] == ["out.partial"]
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    subprocess.run(full, cwd=workspace, check=True, capture_output=True)
    assert main([*arguments, "reference"]) == 0
    for path in (workspace / "reference").iterdir():
        assert (small_disk / "out" / path.name).read_bytes() == path.read_bytes()


def test_a_full_disk_leaves_no_partial_tokenizer(workspace: Path, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(250 << 10))
    assert main(["tokenizer", "corpus.jsonl", "--out", str(small_disk / "t.json")]) == 2
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
