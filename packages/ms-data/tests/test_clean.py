"""Cleaning accounts for every document, is deterministic and resumes after a kill."""

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import ms_data.disk.writer
import ms_data.engine.array_jobs
import ms_data.engine.batches
import ms_data.engine.run
import ms_data.ledger.series
from ms_data import (
    CorpusError,
    OutputError,
    SettingError,
    build,
    clean,
    draw_stats,
    train_tokenizer,
)
from ms_data.cli import main
from ms_data.ledger.entries import read_findings, read_ledger
from ms_data.ledger.record import read_record

from .test_build import random_texts, write_lines
from .test_rules import CHINESE, prose

RULES: dict[str, Any] = {
    "unicode": {},
    "gopher_quality": {"min_words": 20, "min_stop_words": 1},
    "personal_data": {},
}


def kept_texts(folder: Path) -> list[str]:
    """Read the texts that a run wrote, in order."""
    texts = []
    for path in sorted((folder / "documents").iterdir()):
        with zstandard.open(path, "rt", encoding="utf-8") as file:
            texts += [json.loads(line)["text"] for line in file]
    return texts


def write_mixed_corpus(folder: Path, count: int = 40) -> Path:
    """Write documents to drop, change or keep, and malformed and empty lines."""
    lines = []
    for number in range(count):
        text = [prose(number), "too short", f"{prose(number)} me{number}@example.org", CHINESE][
            number % 4
        ]
        lines.append(json.dumps({"text": text}))
    lines[5], lines[9], lines[13] = "{", '{"text": 3}', '{"text": ""}'
    path = folder / "corpus.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def read_tree(folder: Path) -> dict[str, bytes]:
    """Map the relative path of each file in a folder to its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_every_document_has_one_ledger_entry_with_its_outcome(tmp_path: Path) -> None:
    """The entry records the rule setting, the measured value and the limit."""
    path, quarantined = write_mixed_corpus(tmp_path), []
    summary = clean(path, RULES, out=tmp_path / "out", workers=1, on_quarantine=quarantined.append)
    assert summary.documents == 39 == summary.kept + sum(summary.dropped.values()) + 2
    assert summary.quarantined == len(quarantined) == 2
    record = read_record(tmp_path / "out")
    entries = list(read_ledger(tmp_path / "out", record))
    assert [entry.document for entry in entries] == list(range(39))
    assert Counter(entry.fate for entry in entries) == {
        "kept": summary.kept, "dropped": sum(summary.dropped.values()), "quarantined": 2,
    }  # fmt: skip
    short = next(entry for entry in entries if entry.fate == "dropped")
    assert (short.reason, short.value, short.limit) == ("gopher_quality.min_words", 2, 20)
    assert short.place == "corpus.jsonl#2"
    assert record.tally.cuts["personal_data.mail"].documents == 10
    assert not any("@example" in text for text in kept_texts(tmp_path / "out"))
    assert len(kept_texts(tmp_path / "out")) == summary.kept


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(min_size=1, max_size=200) | st.just(prose(3)), min_size=1, max_size=12),
    names=st.lists(
        st.sampled_from(
            ["unicode", "control_characters", "c4_quality", "gopher_quality", "personal_data",
             "gopher_repetition", "fineweb_quality", "c4_paragraphs"]
        ),
        min_size=1, max_size=4, unique=True,
    ),
)  # fmt: skip
def test_ledger_totals_add_up_for_any_texts_and_rules(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], names: list[str]
) -> None:
    """For documents and bytes, input = kept + dropped + removed."""
    folder = tmp_path_factory.mktemp("any")
    out = folder / "out"
    summary = clean(
        write_lines(folder / "a.jsonl", texts), {name: {} for name in names}, out=out, workers=1
    )
    record = read_record(out)
    assert record.tally.faults() == []
    assert summary.documents == len(texts)
    read_findings(out, record)
    assert sum(len(text.encode()) for text in kept_texts(out)) == summary.bytes_out
    assert summary.bytes_in == sum(len(text.encode()) for text in texts)


def test_output_does_not_depend_on_the_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules from a file give the same bytes as rules from a dict."""
    monkeypatch.setattr(ms_data.engine.batches, "BATCH_CHARACTERS", 2000)
    path = write_mixed_corpus(tmp_path)
    (tmp_path / "RULES.toml").write_text(
        "[unicode]\n[gopher_quality]\nmin_words = 20\nmin_stop_words = 1\n[personal_data]\n"
    )
    clean(path, RULES, out=tmp_path / "one", workers=1)
    clean(path, tmp_path / "RULES.toml", out=tmp_path / "three", workers=3)
    assert read_tree(tmp_path / "one") == read_tree(tmp_path / "three")


def run_and_die_at(event: int, run: Any) -> int:
    """Run in a child killed at its n-th write, sync, rename or removal; return its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    remaining = event

    def is_last() -> bool:
        nonlocal remaining
        remaining -= 1
        return remaining == 0

    def patch(name: str, owner: Any) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if is_last():
                if name in ("write_all", "_write"):  # half of the data reaches the disk
                    file = getattr(arguments[0], "_file", arguments[0])
                    file.write(arguments[1][: len(arguments[1]) // 2])
                    file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        setattr(owner, name, call)

    try:
        patch("fsync", os)
        patch("rename", os)
        patch("write_all", ms_data.ledger.series)
        patch("write_all", ms_data.engine.array_jobs)
        patch("_write", ms_data.disk.writer.ShardWriter)
        patch("unlink", os)
        ms_data.engine.run.SAVE_EVERY_S = 0.0
        run()
    except BaseException:
        os._exit(1)
    os._exit(0)


def test_a_run_killed_at_any_write_sync_or_rename_resumes_to_identical_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ms_data.engine.batches, "BATCH_CHARACTERS", 8000)
    path = write_mixed_corpus(tmp_path, 24)
    clean(path, RULES, out=tmp_path / "reference", workers=1)
    expected = read_tree(tmp_path / "reference")
    event, kills = 0, 0
    while True:
        event += 1
        out = tmp_path / f"out{event}"
        status = run_and_die_at(event, lambda out=out: clean(path, RULES, out=out, workers=1))
        assert status in (0, signal.SIGKILL)
        clean(path, RULES, out=out, workers=1)
        assert read_tree(out) == expected
        assert not out.with_name(f"{out.name}.partial").exists()
        if not status:
            break
        kills += 1
    assert kills > 15


def test_resuming_detects_a_flipped_bit_in_partial_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file."""
    monkeypatch.setattr(ms_data.engine.batches, "BATCH_CHARACTERS", 4000)
    path, out = write_mixed_corpus(tmp_path), tmp_path / "out"
    assert run_and_die_at(24, lambda: clean(path, RULES, out=out, workers=1)) == signal.SIGKILL
    partial = tmp_path / "out.partial"
    names = [name for name in read_tree(partial) if not name.endswith(".partial")]
    assert {"journal.msgpack", "documents/part-00000.jsonl.zst"} <= set(names)
    for name in names:
        original = (partial / name).read_bytes()
        for offset in (0, len(original) // 4):
            damaged = bytearray(original)
            damaged[offset] ^= 1
            (partial / name).write_bytes(damaged)
            with pytest.raises(OutputError, match=r"damaged"):
                clean(path, RULES, out=out, workers=1)
        (partial / name).write_bytes(original)
    clean(path, RULES, out=out, workers=1)


def test_rerunning_a_finished_clean_does_nothing_unless_rules_or_corpus_changed(
    tmp_path: Path,
) -> None:
    """Changed rules or a changed corpus are refused by name."""
    path, out = write_mixed_corpus(tmp_path), tmp_path / "out"
    first = clean(path, RULES, out=out, workers=1)
    before = read_tree(out)
    rerun = clean(path, RULES, out=out, workers=1)
    assert rerun.done_before
    assert (rerun.kept, rerun.dropped) == (first.kept, first.dropped)
    assert read_tree(out) == before
    with pytest.raises(OutputError, match=r"rule 2 \(gopher_quality\)"):
        clean(path, RULES | {"gopher_quality": {}}, out=out, workers=1)
    path.write_text(path.read_text() + '{"text": "more"}\n')
    with pytest.raises(OutputError, match="different files or content"):
        clean(path, RULES, out=out, workers=1)


def test_strict_stops_at_the_first_unreadable_line(tmp_path: Path) -> None:
    """No output is left."""
    with pytest.raises(CorpusError, match=r"corpus.jsonl:6"):
        clean(write_mixed_corpus(tmp_path), RULES, out=tmp_path / "out", workers=1, strict=True)
    assert not (tmp_path / "out").exists()


def test_a_killed_worker_is_reported_with_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the signal and suggests fewer workers."""
    from ms_data.engine.pools import WorkerError, _Process

    def kill_then_call(process: _Process, request: bytes) -> bytes:
        process.kill()
        return original_call(process, request)

    original_call = _Process.call
    monkeypatch.setattr(_Process, "call", kill_then_call)
    with pytest.raises(WorkerError, match=r"signal 9.*--workers"):
        clean(write_mixed_corpus(tmp_path), RULES, out=tmp_path / "out", workers=2)


def test_a_build_reads_the_documents_of_a_cleaned_folder(
    tmp_path: Path,
) -> None:
    """The ledger in the same folder is not read as text."""
    summary = clean(write_mixed_corpus(tmp_path), RULES, out=tmp_path / "out", workers=1)
    tokenizer = train_tokenizer(tmp_path / "out", vocab_size=280)
    built = build(tmp_path / "out", tokenizer=tokenizer, out=tmp_path / "shards")
    assert built.documents == summary.kept
    assert built.text_bytes == summary.bytes_out


def test_an_unrelated_ledger_json_is_read_as_text(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "ledger.json").write_text('{"a": "book of accounts"}')
    write_lines(tmp_path / "c" / "a.jsonl", random_texts(1, 3))
    assert clean(tmp_path / "c", {"unicode": {}}, out=tmp_path / "out", workers=1).documents == 4


def test_the_stats_page_is_self_contained_and_escapes_document_text(tmp_path: Path) -> None:
    """One file without scripts or external addresses."""
    path = write_lines(tmp_path / "a.jsonl", ["<script>alert(1)</script>", prose(1), "a b c"])
    clean(path, RULES, out=tmp_path / "out", workers=1)
    draw_stats(tmp_path / "out", out=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "gopher_quality.min_words" in page.replace("<wbr>", "")
    assert "prefers-color-scheme: dark" in page
    assert "&lt;script&gt;" in page
    for part in ("<script", "http:", "https:", "url(", "@import", "src="):
        assert part not in page.replace("http://www.w3.org", "")


def test_a_damaged_ledger_is_refused_by_stats(tmp_path: Path) -> None:
    clean(write_mixed_corpus(tmp_path), RULES, out=tmp_path / "out", workers=1)
    for name in ("ledger.json", "ledger/part-00000.jsonl.zst"):
        path = tmp_path / "out" / name
        original = path.read_bytes()
        damaged = bytearray(original)
        damaged[len(original) // 2] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(SettingError, match=r"damaged|malformed|JSON|ledger"):
            draw_stats(tmp_path / "out", out=tmp_path / "page.html")
        path.write_bytes(original)


def test_init_clean_and_stats_work_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each prints a one-line summary; existing files and bad settings exit 2."""
    rules = tmp_path / "RULES.toml"
    assert main(["init", "clean", "--out", str(rules)]) == 0
    out, corpus = str(tmp_path / "out"), str(write_mixed_corpus(tmp_path))
    assert main(["clean", corpus, str(rules), "--out", out, "--workers", "1", "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed[printed.index("{\n") :])["documents"] == 39
    assert main(["stats", out, "--out", str(tmp_path / "page.html")]) == 0
    assert main(["clean", corpus, str(rules), "--out", out, "--workers", "0"]) == 2
    assert main(["stats", corpus, "--out", str(tmp_path / "page.html")]) == 2
    assert main(["init", "clean", "--out", str(rules)]) == 2


@pytest.mark.parametrize("command", ["clean", "dedup"])
def test_a_corpus_without_any_readable_document_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with a wrong column name: exit 2 with the first problem, and no output."""
    path = write_lines(tmp_path / "a.jsonl", ["one", "two"])
    (tmp_path / "RULES.toml").write_text("[unicode]\n")
    rules = [str(tmp_path / "RULES.toml")] if command == "clean" else []
    arguments = [command, str(path), *rules, "--out", str(tmp_path / "out")]
    assert main([*arguments, "--text-column", "body"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"ms-data: no document of {path} can be read: {path}:1: ")
    assert "name the text column with --text-column" in error
    assert main([*arguments, "--text-column", "body", "--strict"]) == 2
    assert "; without --strict it is skipped and reported" in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["RULES.toml", "a.jsonl"]
