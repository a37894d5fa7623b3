"""An array of jobs and a merge end in the bytes of one machine."""

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

from .chats import write_rows, write_tokenizer
from .test_build import facts_of, texts_of, write_lines

RULES = {"gopher_quality": {"min_words": 5, "min_stop_words": 0}, "unicode": {}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of which some come twice, and a line that is no JSON."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = texts_of(1, 60)
    write_lines(folder / "a.jsonl", texts)
    write_lines(folder / "b.jsonl.gz", [*texts_of(2, 60), *texts[:20]])
    return folder


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Tokenizer:
    """A small BPE."""
    return train_tokenizer(corpus, vocab_size=320)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of two thousand characters, so that every job has some."""
    monkeypatch.setattr(batches, "BATCH_CHARACTERS", 2000)


def files_below(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


Work = Callable[..., Any]


@pytest.fixture
def works(corpus: Path, tokenizer: Tokenizer) -> dict[str, Work]:
    """Each command with its settings, for any OUT and shard."""
    options = DedupOptions(substring_words=8)
    return {
        "build": lambda out, **more: build(
            corpus, tokenizer=tokenizer, out=out, held_out_fraction=0.2, **more
        ),
        "clean": lambda out, **more: clean(corpus, RULES, out=out, workers=1, **more),
        "dedup": lambda out, **more: dedup(corpus, out=out, options=options, workers=1, **more),
    }


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("name", ["build", "clean", "dedup"])
def test_any_number_of_jobs_gives_the_bytes_of_one_machine(
    name: str, count: int, works: dict[str, Work], tmp_path: Path
) -> None:
    """In any order, with jobs that have nothing to do, and nothing is left beside OUT."""
    whole = works[name](tmp_path / "whole")
    done = [works[name](tmp_path / "out", shard=f"{n}/{count}") for n in range(count, 0, -1)]
    assert sum(one.documents for one in done) == whole.documents
    merged = works[name](tmp_path / "out", shard=f"merge/{count}")
    assert (merged.documents, merged.size_bytes) == (whole.documents, whole.size_bytes)
    assert files_below(tmp_path / "out") == files_below(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_a_job_that_is_missing_is_named(works: dict[str, Work], tmp_path: Path) -> None:
    """And one that is done already has nothing to do."""
    for name, work in works.items():
        work(tmp_path / name, shard="1/2")
        with pytest.raises(OutputError, match=r"2-of-2\.answers is missing; .* --shard 2/2"):
            work(tmp_path / name, shard="merge/2")
        again = work(tmp_path / name, shard="1/2")
        assert getattr(again, "done_before", False) or getattr(again, "built_before", False)


def test_instruction_sets_are_shared_out_too(tmp_path: Path) -> None:
    """The words of conversations come back whole."""
    said = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Since 日本."}]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": said * n} for n in range(1, 40)])
    model = write_tokenizer(tmp_path / "model")
    for out, shard in (("whole", None), ("out", "1/2"), ("out", "2/2"), ("out", "merge/2")):
        build(rows, tokenizer=model, out=tmp_path / out, chat=model, shard=shard)
    assert files_below(tmp_path / "out") == files_below(tmp_path / "whole")


def test_other_settings_and_another_corpus_are_found(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A merge takes no answer to another question."""
    out = tmp_path / "out"
    lines = write_lines(tmp_path / "a.jsonl", texts_of(7, 20))
    clean(lines, RULES, out=out, workers=1, shard="1/1")
    with pytest.raises(OutputError, match="other settings"):
        clean(lines, {"unicode": {}}, out=out, workers=1, shard="merge/1")
    write_lines(lines, texts_of(8, 20))
    with pytest.raises(OutputError, match="may have changed since"):
        clean(lines, RULES, out=out, workers=1, shard="merge/1")


def test_every_flipped_bit_and_cut_of_the_answers_is_found(
    works: dict[str, Work], tmp_path: Path
) -> None:
    """Whatever byte it is in; nothing is merged."""
    out = tmp_path / "out"
    works["build"](out, shard="1/1")
    path = tmp_path / "out.shards" / "1-of-1.answers"
    content = path.read_bytes()
    for at in [*range(80), *range(80, len(content), 997)]:
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with pytest.raises(OutputError):
            works["build"](out, shard="merge/1")
    for size in (0, 7, 30, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(OutputError):
            works["build"](out, shard="merge/1")
    path.write_bytes(content)
    works["build"](out, shard="merge/1")


@pytest.mark.parametrize("cut", [0, 5, 24, 25, 60, 1000, 5000])
def test_an_interrupted_job_goes_on(cut: int, works: dict[str, Work], tmp_path: Path) -> None:
    """From wherever its file ends, and with rubbish behind what was written."""
    works["clean"](tmp_path / "one", shard="1/2")
    expected = (tmp_path / "one.shards" / "1-of-2.answers").read_bytes()
    folder = tmp_path / "out.shards"
    folder.mkdir()
    (folder / "1-of-2.answers.partial").write_bytes(expected[:cut] + b"\xff" * 9)
    works["clean"](tmp_path / "out", shard="1/2")
    assert files_below(folder) == {"1-of-2.answers": expected}


@pytest.mark.parametrize("text", ["0/2", "3/2", "1/0", "merge", "1-2", "merge/0", "-1/2", "x/3"])
def test_what_is_no_shard_is_refused(text: str, works: dict[str, Work], tmp_path: Path) -> None:
    """With the form that is meant."""
    for work in works.values():
        with pytest.raises(SettingError, match=r"use 3/16 for the third of 16 jobs"):
            work(tmp_path / "out", shard=text)


def test_two_processes_cannot_write_one_part(works: dict[str, Work], tmp_path: Path) -> None:
    """The second one is told so."""
    shard = ArrayShard.parse("1/2", tmp_path / "out", "stdlib")
    assert shard is not None
    with shard.writing(request_key(b"")), pytest.raises(OutputError, match="another process"):
        works["build"](tmp_path / "out", shard="1/2")


def test_a_job_of_a_build_says_what_it_has_made(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers with some tokens, and no shards: a merge makes those."""
    (tmp_path / "t.json").write_bytes(tokenizer.content)
    line = ["build", str(corpus), "--tokenizer", str(tmp_path / "t.json")]
    assert main([*line, "--out", str(tmp_path / "out"), "--shard", "1/1"]) == 0
    said = capsys.readouterr().out.partition("1-of-1.answers:")[2]
    assert " tokens; encoded " in said
    assert "shards" not in said


def test_the_command_takes_shards(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a wrong one is bad input, in one line."""
    rules = tmp_path / "rules.toml"
    rules.write_text("[unicode]\n")
    line = ["clean", str(corpus), str(rules), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main([*line, "--shard", "1/1"]) == 0
    assert "1-of-1.answers: 140 documents" in capsys.readouterr().out
    assert main([*line, "--shard", "merge/1"]) == 0
    assert main([*line, "--shard", "9/1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_killed_job_ends_in_the_same_bytes(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill -9 while it works, then the same command."""
    monkeypatch.undo()  # the process has batches of the usual size
    file = tmp_path / "tokenizer.json"
    file.write_bytes(tokenizer.content)
    big = write_lines(tmp_path / "big.jsonl", texts_of(9, 1000, longest=9000))
    build(big, tokenizer=file, out=tmp_path / "whole")
    command = [sys.executable, "-m", "ms_data", "build", str(big), "--tokenizer", str(file)]
    command += ["--out", str(tmp_path / "out"), "--shard", "1/1"]
    partial = tmp_path / "out.shards" / "1-of-1.answers.partial"
    for _ in range(5):  # on a busy machine it may be done before it is killed
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            if (facts := facts_of(partial)) and facts.st_size > 1000:
                break
            time.sleep(0.001)
        process.kill()
        if process.wait() == -signal.SIGKILL:
            break
        shutil.rmtree(partial.parent)
    assert process.returncode == -signal.SIGKILL, "it was always done before it could be killed"
    assert subprocess.run(command, check=True, capture_output=True).returncode == 0
    build(big, tokenizer=file, out=tmp_path / "out", shard="merge/1")
    assert files_below(tmp_path / "out") == files_below(tmp_path / "whole")
