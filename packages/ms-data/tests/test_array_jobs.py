"""An array of jobs and its merge give the same bytes as a single run."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ms_data import (
    DedupOptions,
    OutputError,
    SettingError,
    Tokenizer,
    build,
    clean,
    dedup,
    train_tokenizer,
)
from ms_data.cli import main
from ms_data.engine import batches
from ms_data.engine.array_jobs import ArrayShard, request_key

from .chat_templates import write_rows, write_tokenizer
from .test_build import random_texts, stat_or_none, write_lines

RULES = {"gopher_quality": {"min_words": 5, "min_stop_words": 0}, "unicode": {}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts with some duplicates."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = random_texts(1, 60)
    write_lines(folder / "a.jsonl", texts)
    write_lines(folder / "b.jsonl.gz", [*random_texts(2, 60), *texts[:20]])
    return folder


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Tokenizer:
    """A small BPE tokenizer."""
    return train_tokenizer(corpus, vocab_size=320)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use batches of two thousand characters, so every job gets some."""
    monkeypatch.setattr(batches, "BATCH_CHARACTERS", 2000)


def read_tree(folder: Path) -> dict[str, bytes]:
    """Map the relative path of each file in a folder to its content."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


Command = Callable[..., Any]


@pytest.fixture
def commands(corpus: Path, tokenizer: Tokenizer) -> dict[str, Command]:
    """Map each command to a call that takes an output folder and a shard."""
    options = DedupOptions(substring_words=8)
    return {
        "build": lambda out, **extra: build(
            corpus, tokenizer=tokenizer, out=out, held_out_fraction=0.2, **extra
        ),
        "clean": lambda out, **extra: clean(corpus, RULES, out=out, workers=1, **extra),
        "dedup": lambda out, **extra: dedup(corpus, out=out, options=options, workers=1, **extra),
    }


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("name", ["build", "clean", "dedup"])
def test_any_number_of_jobs_gives_the_same_bytes_as_one_run(
    name: str, count: int, commands: dict[str, Command], tmp_path: Path
) -> None:
    """In any order, including jobs without work; no other files are left."""
    reference = commands[name](tmp_path / "reference")
    summaries = [
        commands[name](tmp_path / "out", shard=f"{n}/{count}") for n in range(count, 0, -1)
    ]
    assert sum(summary.documents for summary in summaries) == reference.documents
    merged = commands[name](tmp_path / "out", shard=f"merge/{count}")
    assert (merged.documents, merged.size_bytes) == (reference.documents, reference.size_bytes)
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "reference")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "reference"]


def test_merging_names_a_missing_job(commands: dict[str, Command], tmp_path: Path) -> None:
    """Rerunning a finished job does nothing."""
    for name, work in commands.items():
        work(tmp_path / name, shard="1/2")
        with pytest.raises(OutputError, match=r"2-of-2\.answers is missing; .* --shard 2/2"):
            work(tmp_path / name, shard="merge/2")
        rerun = work(tmp_path / name, shard="1/2")
        assert getattr(rerun, "done_before", False) or getattr(rerun, "built_before", False)


def test_instruction_sets_can_be_built_by_array_jobs(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Since 日本."},
    ]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": messages * n} for n in range(1, 40)])
    model = write_tokenizer(tmp_path / "model")
    for out, shard in (("reference", None), ("out", "1/2"), ("out", "2/2"), ("out", "merge/2")):
        build(rows, tokenizer=model, out=tmp_path / out, chat=model, shard=shard)
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "reference")


def test_merging_with_other_settings_or_another_corpus_is_refused(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    lines = write_lines(tmp_path / "a.jsonl", random_texts(7, 20))
    clean(lines, RULES, out=out, workers=1, shard="1/1")
    with pytest.raises(OutputError, match="other settings"):
        clean(lines, {"unicode": {}}, out=out, workers=1, shard="merge/1")
    write_lines(lines, random_texts(8, 20))
    with pytest.raises(OutputError, match="may have changed since"):
        clean(lines, RULES, out=out, workers=1, shard="merge/1")


def test_flipped_bits_and_truncations_of_answer_files_are_detected(
    commands: dict[str, Command], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    commands["build"](out, shard="1/1")
    path = tmp_path / "out.shards" / "1-of-1.answers"
    content = path.read_bytes()
    for offset in [*range(80), *range(80, len(content), 997)]:
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 4]) + content[offset + 1 :])
        with pytest.raises(OutputError):
            commands["build"](out, shard="merge/1")
    for size in (0, 7, 30, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(OutputError):
            commands["build"](out, shard="merge/1")
    path.write_bytes(content)
    commands["build"](out, shard="merge/1")


@pytest.mark.parametrize("cut", [0, 5, 24, 25, 60, 1000, 5000])
def test_an_interrupted_job_resumes(cut: int, commands: dict[str, Command], tmp_path: Path) -> None:
    """From any length of its partial file, followed by garbage."""
    commands["clean"](tmp_path / "one", shard="1/2")
    expected = (tmp_path / "one.shards" / "1-of-2.answers").read_bytes()
    folder = tmp_path / "out.shards"
    folder.mkdir()
    (folder / "1-of-2.answers.partial").write_bytes(expected[:cut] + b"\xff" * 9)
    commands["clean"](tmp_path / "out", shard="1/2")
    assert read_tree(folder) == {"1-of-2.answers": expected}


@pytest.mark.parametrize("text", ["0/2", "3/2", "1/0", "merge", "1-2", "merge/0", "-1/2", "x/3"])
def test_malformed_shards_are_refused(
    text: str, commands: dict[str, Command], tmp_path: Path
) -> None:
    """The error shows the expected form."""
    for work in commands.values():
        with pytest.raises(SettingError, match=r"use 3/16 for the third of 16 jobs"):
            work(tmp_path / "out", shard=text)


def test_two_processes_cannot_write_the_same_part(
    commands: dict[str, Command], tmp_path: Path
) -> None:
    shard = ArrayShard.parse("1/2", tmp_path / "out", "stdlib")
    assert shard is not None
    with shard.writing(request_key(b"")), pytest.raises(OutputError, match="another process"):
        commands["build"](tmp_path / "out", shard="1/2")


def test_a_build_job_reports_tokens_and_no_shards(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the merge writes shards."""
    (tmp_path / "t.json").write_bytes(tokenizer.content)
    command = ["build", str(corpus), "--tokenizer", str(tmp_path / "t.json")]
    assert main([*command, "--out", str(tmp_path / "out"), "--shard", "1/1"]) == 0
    output = capsys.readouterr().out.partition("1-of-1.answers:")[2]
    assert " tokens; encoded " in output
    assert "shards" not in output


def test_the_command_accepts_shards(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A malformed shard is bad input, in one line."""
    rules = tmp_path / "rules.toml"
    rules.write_text("[unicode]\n")
    command = ["clean", str(corpus), str(rules), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main([*command, "--shard", "1/1"]) == 0
    assert "1-of-1.answers: 140 documents" in capsys.readouterr().out
    assert main([*command, "--shard", "merge/1"]) == 0
    assert main([*command, "--shard", "9/1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_killed_job_resumes_to_identical_bytes(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL while it works, then the same command."""
    monkeypatch.undo()  # the subprocess uses batches of the default size
    tokenizer_path = tmp_path / "tokenizer.json"
    tokenizer_path.write_bytes(tokenizer.content)
    big = write_lines(tmp_path / "big.jsonl", random_texts(9, 1000, max_words=9000))
    build(big, tokenizer=tokenizer_path, out=tmp_path / "reference")
    command = [
        sys.executable,
        "-m",
        "ms_data",
        "build",
        str(big),
        "--tokenizer",
        str(tokenizer_path),
    ]
    command += ["--out", str(tmp_path / "out"), "--shard", "1/1"]
    partial = tmp_path / "out.shards" / "1-of-1.answers.partial"
    for _ in range(5):  # on a busy machine it may finish before the kill
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            if (info := stat_or_none(partial)) and info.st_size > 1000:
                break
            time.sleep(0.001)
        process.kill()
        if process.wait() == -signal.SIGKILL:
            break
        shutil.rmtree(partial.parent)
    assert process.returncode == -signal.SIGKILL, (
        "the job always finished before it could be killed"
    )
    assert subprocess.run(command, check=True, capture_output=True).returncode == 0
    build(big, tokenizer=tokenizer_path, out=tmp_path / "out", shard="merge/1")
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "reference")
