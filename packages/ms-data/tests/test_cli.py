"""The command: what it prints, what it returns, and one line for every mistake."""

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

from .test_build import texts_of, write_lines


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a corpus, a tokenizer and shards made by the command."""
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "corpus.jsonl", texts_of(1, 60))
    assert main(["tokenizer", "corpus.jsonl", "--vocab-size", "300", "--out", "t.json"]) == 0
    build = ["build", "corpus.jsonl", "--tokenizer", "t.json", "--out", "shards"]
    assert main([*build, "--held-out-fraction", "0.2"]) == 0
    return tmp_path


def test_the_four_commands_do_what_they_say(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokenizer, build, inspect and verify exit 0 and say what they did in one line or two."""
    assert main(["tokenizer", "corpus.jsonl", "--vocab-size", "290", "--out", "u.json"]) == 0
    assert capsys.readouterr().out == "u.json: 290 tokens\n"
    assert main(["build", "corpus.jsonl", "--tokenizer", "u.json", "--out", "again"]) == 0
    assert capsys.readouterr().out.startswith("again: 60 documents, ")
    assert main(["inspect", "shards"]) == 0
    assert "held_out" in capsys.readouterr().out
    assert main(["verify", "shards"]) == 0
    assert "are intact" in capsys.readouterr().out


def test_facts_come_as_json(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What --json prints is one JSON value with the same facts as the Python face."""
    capsys.readouterr()
    assert main(["inspect", "shards", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["fingerprint"] == inspect("shards").fingerprint
    assert main(["verify", "shards", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["faults"] == []
    build = ["build", "corpus.jsonl", "--tokenizer", "t.json", "--out", "more", "--json"]
    assert main(build) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 60


def test_verify_exits_1_and_names_the_place(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped bit is one line with file and frame."""
    shard = place / "shards" / "shard-00000.msd"
    content = bytearray(shard.read_bytes())
    content[30] ^= 4
    shard.write_bytes(content)
    capsys.readouterr()
    assert main(["verify", "shards"]) == 1
    assert "shard-00000.msd: frame 0: checksum mismatch" in capsys.readouterr().out
    assert main(["verify", "shards", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["faults"][0]["part"] == "frame 0"
    (place / "shards" / "index.json").write_bytes(b"{}")
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
    place: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """Each mistake is said in one line with its place; nothing is left behind."""
    (place / "empty").mkdir()
    (place / "blank.txt").write_text("")
    (place / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (place / "bad.jsonl").write_text('{"text": "x"}\nnonsense\n')
    (place / "bad.txt.gz").write_bytes(b"not gzip")
    (place / "bad.txt.zst").write_bytes(b"\x28\xb5\x2f\xfd cut")
    arguments, text = BAD[case]
    capsys.readouterr()
    assert main([*arguments, "--out", "new"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("ms-data: ")
    assert told.err.count("\n") == 1
    assert text in told.err
    assert not (place / "new").exists()
    assert not (place / "new.partial").exists()


def test_other_bad_input_is_one_line_and_exit_2(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An occupied folder, a small vocabulary, a folder without shards, a bad place to write."""
    os.mkfifo(place / "pipe")
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
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert text in told


def test_output_that_finds_no_room_is_one_line_and_exit_2(place: Path) -> None:
    """As when the facts go to a file on a full disk."""
    command = [sys.executable, "-m", "ms_data", "inspect", "shards"]
    with open("/dev/full", "w") as full:
        told = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert told.returncode == 2
    assert told.stderr.count("\n") == 1
    assert "No space left on device" in told.stderr


def test_wrong_arguments_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Argparse's own mistakes have the same status."""
    for arguments in ([], ["bild"], ["build", "x"], ["tokenizer", "x", "--vocab-size", "many"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("command", ["tokenizer", "build", "inspect", "verify"])
def test_every_command_has_help_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Help exits 0 and shows a line that can be typed."""
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"example: ms-data {command} " in capsys.readouterr().out.replace("\n", " ")


def test_the_version_is_printed_and_help_names_the_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`--version` is the package's, with exit 0."""
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"ms-data {ms_data.__version__}\n"


def test_a_finished_build_again_has_nothing_to_do(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 0 and one line; another setting, another corpus or damage is refused with its name."""
    command = ["build", "corpus.jsonl", "--tokenizer", "t.json", "--out", "shards"]
    before = {path: path.stat().st_mtime_ns for path in (place / "shards").iterdir()}
    capsys.readouterr()
    assert main([*command, "--held-out-fraction", "0.2"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("shards: built before, nothing to do: 60 documents, ")
    assert told.count("\n") == 1
    assert main([*command, "--held-out-fraction", "0.2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["built_before"] is True
    assert {path: path.stat().st_mtime_ns for path in (place / "shards").iterdir()} == before
    assert main(command) == 2
    assert "another build: held_out_fraction is 0.0, was 0.2; use" in capsys.readouterr().err
    corpus = place / "corpus.jsonl"
    corpus.write_bytes(corpus.read_bytes())  # later, and the same
    assert main([*command, "--held-out-fraction", "0.2"]) == 0
    corpus.write_bytes(corpus.read_bytes().replace(b"e", b"a"))
    capsys.readouterr()
    assert main([*command, "--held-out-fraction", "0.2"]) == 2
    assert "the corpus content changed, possibly in corpus.jsonl" in capsys.readouterr().err
    os.utime(corpus, (1, 1))
    os.truncate(place / "shards" / "shard-00000.msd", 50)
    assert main([*command, "--held-out-fraction", "0.2"]) == 2
    assert "shard-00000.msd: damaged: has 50 bytes, but" in capsys.readouterr().err
    (place / "shards" / "shard-00000.msd").write_bytes(b"")
    (place / "corpus.jsonl").write_text('{"text": "x"}\n')
    assert main([*command, "--held-out-fraction", "0.2"]) == 2
    assert "the corpus has different files or content" in capsys.readouterr().err


def test_files_left_out_are_said_with_their_count(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By build and tokenizer, as words and as JSON; a named one is refused by its kind."""
    (place / "mixed").mkdir()
    (place / "mixed" / "a.txt").write_text("some text")
    (place / "mixed" / "b.bin").write_bytes(b"a\0b")
    (place / "mixed" / "c.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    said = ", 2 non-text files skipped (1 PNG image, 1 file with NUL bytes)"
    build = ["build", "mixed", "--tokenizer", "t.json", "--out"]
    capsys.readouterr()
    assert main([*build, "one"]) == 0
    assert capsys.readouterr().out.startswith(f"one: 1 documents{said}, ")
    assert main(["tokenizer", "mixed", "--vocab-size", "300", "--out", "u.json"]) == 0
    assert said in capsys.readouterr().out
    kinds = {"PNG image": 1, "file with NUL bytes": 1}
    for arguments in ([*build, "two"], ["tokenizer", "mixed", "--out", "v.json"]):
        assert main([*arguments, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["left_out"] == kinds
    assert main(["build", "mixed/c.png", "--tokenizer", "t.json", "--out", "three"]) == 2
    assert "c.png: PNG image, not text; pass" in capsys.readouterr().err


def test_an_interrupted_command_exits_130_in_one_line(place: Path) -> None:
    """A real SIGINT while it tokenizes; what is kept is said."""
    write_lines(place / "large.jsonl", texts_of(3, 60_000))
    command = [sys.executable, "-m", "ms_data", "build", "large.jsonl", "--tokenizer", "t.json"]
    # A job in the background of a shell ignores the signal, and so would what it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [*command, "--out", "new"], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    finally:
        signal.signal(signal.SIGINT, before)
    while not (place / "new.partial" / "shard-00000.msd").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, told.count(b"\n")) == (b"", 1)
    assert told.startswith(b"ms-data: interrupted")


def test_progress_is_a_bar_on_a_terminal(place: Path) -> None:
    """On a terminal the bar goes to standard error; standard output holds the result alone."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ms_data", "build", "corpus.jsonl", "--tokenizer", "t.json"]
    done = subprocess.run(
        [*command, "--out", "more"], cwd=place, stdout=subprocess.PIPE, stderr=theirs, text=True
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "tokenizing" in shown
    assert "kB" in shown or "bytes" in shown
    assert done.stdout.startswith("more: 60 documents")


def test_progress_is_plain_lines_elsewhere(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal each line says how far, how fast and how long still."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    (place / "texts").mkdir()
    for number, text in enumerate(texts_of(2, 9)):
        (place / "texts" / f"{number}.txt").write_text(text)
    assert main(["tokenizer", "texts", "--out", "u.json"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 8
    for line in lines:
        assert re.fullmatch(r"reading: \d+% of \d+ MB, [\d.]+ MB/s, \d+ s left", line)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small tmpfs can only be mounted by root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_one_line_and_exit_2(place: Path, small_disk: Path) -> None:
    """Nothing half-written stays on the disk, and the line says which disk it was."""
    write_lines(place / "large.jsonl", texts_of(3, 20_000))
    never_saved = (
        "import sys; from ms_data.cli import main;"
        "sys.modules['ms_data.engine.run'].SAVE_EVERY_S = 1e9; sys.exit(main())"
    )
    command = [sys.executable, "-c", never_saved, "build", "large.jsonl", "--tokenizer", "t.json"]
    done = subprocess.run(
        [*command, "--out", str(small_disk / "out")], cwd=place, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr
    assert str(small_disk) in done.stderr
    assert list(small_disk.iterdir()) == []


def test_a_build_goes_on_when_the_disk_has_room_again(place: Path, small_disk: Path) -> None:
    """Past the first save the work is kept, and ends in the bytes of a build with room."""
    write_lines(place / "large.jsonl", texts_of(3, 20_000))
    script = (
        "import sys; from ms_data.cli import main; modules = sys.modules;"
        "modules['ms_data.engine.run'].SAVE_EVERY_S = 0.0;"
        "modules['ms_data.engine.batches'].BATCH_CHARACTERS = 60_000; sys.exit(main())"
    )
    arguments = ["build", "large.jsonl", "--tokenizer", "t.json", "--out"]
    full = [sys.executable, "-c", script, *arguments, str(small_disk / "out")]
    done = subprocess.run(full, cwd=place, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "the same command resumes there" in done.stderr
    assert [path.name for path in small_disk.iterdir()] == ["out.partial"]
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    subprocess.run(full, cwd=place, check=True, capture_output=True)
    assert main([*arguments, "calm"]) == 0
    for path in (place / "calm").iterdir():
        assert (small_disk / "out" / path.name).read_bytes() == path.read_bytes()


def test_a_full_disk_stops_the_tokenizer_too(place: Path, small_disk: Path) -> None:
    """A tokenizer file is whole or not there."""
    (small_disk / "filler").write_bytes(bytes(250 << 10))
    assert main(["tokenizer", "corpus.jsonl", "--out", str(small_disk / "t.json")]) == 2
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
