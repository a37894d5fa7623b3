"""Cleaning adds up, gives the same bytes however it is run, and goes on after any kill."""

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

from .test_build import texts_of, write_lines
from .test_rules import CHINESE, prose

RULES: dict[str, Any] = {
    "unicode": {},
    "gopher_quality": {"min_words": 20, "min_stop_words": 1},
    "personal_data": {},
}


def kept_in(folder: Path) -> list[str]:
    """The texts that a pass wrote, in order."""
    found = []
    for path in sorted((folder / "documents").iterdir()):
        with zstandard.open(path, "rt", encoding="utf-8") as file:
            found += [json.loads(line)["text"] for line in file]
    return found


def some_lines(folder: Path, count: int = 40) -> Path:
    """Documents of which some are dropped, changed, malformed or empty."""
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


def ledger_files(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its name below it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_what_is_kept_dropped_and_quarantined_is_all_there_was(tmp_path: Path) -> None:
    """Each document has one line of the ledger, with its fate, the setting and the value."""
    path, named = some_lines(tmp_path), []
    summary = clean(path, RULES, out=tmp_path / "out", workers=1, on_quarantine=named.append)
    assert summary.documents == 39 == summary.kept + sum(summary.dropped.values()) + 2
    assert summary.quarantined == len(named) == 2
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
    assert not any("@example" in text for text in kept_in(tmp_path / "out"))
    assert len(kept_in(tmp_path / "out")) == summary.kept


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
def test_the_ledger_adds_up_whatever_the_texts_and_rules(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], names: list[str]
) -> None:
    """Documents and bytes: in = kept + dropped + taken away, in the record and by its lines."""
    folder = tmp_path_factory.mktemp("any")
    out = folder / "out"
    summary = clean(
        write_lines(folder / "a.jsonl", texts), {name: {} for name in names}, out=out, workers=1
    )
    record = read_record(out)
    assert record.tally.faults() == []
    assert summary.documents == len(texts)
    read_findings(out, record)
    assert sum(len(text.encode()) for text in kept_in(out)) == summary.bytes_out
    assert summary.bytes_in == sum(len(text.encode()) for text in texts)


def test_the_bytes_do_not_depend_on_the_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process and three write the same files, and so does a file of rules."""
    monkeypatch.setattr(ms_data.engine.batches, "BATCH_CHARACTERS", 2000)
    path = some_lines(tmp_path)
    (tmp_path / "RULES.toml").write_text(
        "[unicode]\n[gopher_quality]\nmin_words = 20\nmin_stop_words = 1\n[personal_data]\n"
    )
    clean(path, RULES, out=tmp_path / "one", workers=1)
    clean(path, tmp_path / "RULES.toml", out=tmp_path / "three", workers=3)
    assert ledger_files(tmp_path / "one") == ledger_files(tmp_path / "three")


def dying_at(event: int, run: Any) -> int:
    """Runs in a child that is killed at the n-th write, sync, rename or removal; how it ended."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    left = event

    def count() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    def dying(name: str, place: Any) -> None:
        function = getattr(place, name)

        def call(*arguments: Any, **more: Any) -> Any:
            if count():
                if name in ("write_all", "_write"):  # half of it is on the disk
                    file = getattr(arguments[0], "_file", arguments[0])
                    file.write(arguments[1][: len(arguments[1]) // 2])
                    file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **more)

        setattr(place, name, call)

    try:
        dying("fsync", os)
        dying("rename", os)
        dying("write_all", ms_data.ledger.series)
        dying("write_all", ms_data.engine.array_jobs)
        dying("_write", ms_data.disk.writer.ShardWriter)
        dying("unlink", os)
        ms_data.engine.run.SAVE_EVERY_S = 0.0
        run()
    except BaseException:
        os._exit(1)
    os._exit(0)


def test_a_kill_at_any_write_sync_or_rename_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command again ends in the bytes of a calm run, wherever it was killed."""
    monkeypatch.setattr(ms_data.engine.batches, "BATCH_CHARACTERS", 8000)
    path = some_lines(tmp_path, 24)
    clean(path, RULES, out=tmp_path / "calm", workers=1)
    calm = ledger_files(tmp_path / "calm")
    event, kills = 0, 0
    while True:
        event += 1
        out = tmp_path / f"out{event}"
        status = dying_at(event, lambda out=out: clean(path, RULES, out=out, workers=1))
        assert status in (0, signal.SIGKILL)
        clean(path, RULES, out=out, workers=1)
        assert ledger_files(out) == calm
        assert not out.with_name(f"{out.name}.partial").exists()
        if not status:
            break
        kills += 1
    assert kills > 15


def test_no_flipped_bit_of_interrupted_work_is_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte that is kept is checked before the work goes on; the file is named."""
    monkeypatch.setattr(ms_data.engine.batches, "BATCH_CHARACTERS", 4000)
    path, out = some_lines(tmp_path), tmp_path / "out"
    assert dying_at(24, lambda: clean(path, RULES, out=out, workers=1)) == signal.SIGKILL
    aside = tmp_path / "out.partial"
    names = [name for name in ledger_files(aside) if not name.endswith(".partial")]
    assert {"journal.msgpack", "documents/part-00000.jsonl.zst"} <= set(names)
    for name in names:
        sound = (aside / name).read_bytes()
        for at in (0, len(sound) // 4):
            damaged = bytearray(sound)
            damaged[at] ^= 1
            (aside / name).write_bytes(damaged)
            with pytest.raises(OutputError, match=r"damaged"):
                clean(path, RULES, out=out, workers=1)
        (aside / name).write_bytes(sound)
    clean(path, RULES, out=out, workers=1)


def test_a_finished_folder_is_known_again_and_others_are_refused(tmp_path: Path) -> None:
    """The same again does nothing; other rules or another corpus are named."""
    path, out = some_lines(tmp_path), tmp_path / "out"
    first = clean(path, RULES, out=out, workers=1)
    before = ledger_files(out)
    again = clean(path, RULES, out=out, workers=1)
    assert again.done_before
    assert (again.kept, again.dropped) == (first.kept, first.dropped)
    assert ledger_files(out) == before
    with pytest.raises(OutputError, match=r"rule 2 \(gopher_quality\)"):
        clean(path, RULES | {"gopher_quality": {}}, out=out, workers=1)
    path.write_text(path.read_text() + '{"text": "more"}\n')
    with pytest.raises(OutputError, match="different files or content"):
        clean(path, RULES, out=out, workers=1)


def test_strict_stops_at_what_cannot_be_read(tmp_path: Path) -> None:
    """The place is named, and nothing is left."""
    with pytest.raises(CorpusError, match=r"corpus.jsonl:6"):
        clean(some_lines(tmp_path), RULES, out=tmp_path / "out", workers=1, strict=True)
    assert not (tmp_path / "out").exists()


def test_a_process_that_is_killed_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the signal and what to do, and what is done is kept."""
    from ms_data.engine.pools import WorkerError, _Process

    def killed(process: _Process, request: bytes) -> bytes:
        process.kill()
        return asked(process, request)

    asked = _Process.call
    monkeypatch.setattr(_Process, "call", killed)
    with pytest.raises(WorkerError, match=r"signal 9.*--workers"):
        clean(some_lines(tmp_path), RULES, out=tmp_path / "out", workers=2)


def test_a_build_reads_the_documents_of_a_cleaned_folder(
    tmp_path: Path,
) -> None:
    """The ledger beside them is no text to train on."""
    summary = clean(some_lines(tmp_path), RULES, out=tmp_path / "out", workers=1)
    tokenizer = train_tokenizer(tmp_path / "out", vocab_size=280)
    built = build(tmp_path / "out", tokenizer=tokenizer, out=tmp_path / "shards")
    assert built.documents == summary.kept
    assert built.text_bytes == summary.bytes_out


def test_an_adjusted_rule_leaves_an_ordinary_ledger_alone(tmp_path: Path) -> None:
    """A corpus may hold a file of that name."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "ledger.json").write_text('{"a": "book of accounts"}')
    write_lines(tmp_path / "c" / "a.jsonl", texts_of(1, 3))
    assert clean(tmp_path / "c", {"unicode": {}}, out=tmp_path / "out", workers=1).documents == 4


def test_the_page_needs_nothing_else_and_shows_every_reason(tmp_path: Path) -> None:
    """One file without script or address; text of documents cannot break out of it."""
    path = write_lines(tmp_path / "a.jsonl", ["<script>alert(1)</script>", prose(1), "a b c"])
    clean(path, RULES, out=tmp_path / "out", workers=1)
    draw_stats(tmp_path / "out", out=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "gopher_quality.min_words" in page.replace("<wbr>", "")
    assert "prefers-color-scheme: dark" in page
    assert "&lt;script&gt;" in page
    for part in ("<script", "http:", "https:", "url(", "@import", "src="):
        assert part not in page.replace("http://www.w3.org", "")


def test_a_damaged_ledger_is_not_drawn(tmp_path: Path) -> None:
    """A flipped bit anywhere is found, and the file is named."""
    clean(some_lines(tmp_path), RULES, out=tmp_path / "out", workers=1)
    for name in ("ledger.json", "ledger/part-00000.jsonl.zst"):
        path = tmp_path / "out" / name
        sound = path.read_bytes()
        damaged = bytearray(sound)
        damaged[len(sound) // 2] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(SettingError, match=r"damaged|malformed|JSON|ledger"):
            draw_stats(tmp_path / "out", out=tmp_path / "page.html")
        path.write_bytes(sound)


def test_the_commands_clean_draw_and_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`init clean`, `clean` and `stats` work together, and say one line of what they did."""
    rules = tmp_path / "RULES.toml"
    assert main(["init", "clean", "--out", str(rules)]) == 0
    out, corpus = str(tmp_path / "out"), str(some_lines(tmp_path))
    assert main(["clean", corpus, str(rules), "--out", out, "--workers", "1", "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed[printed.index("{\n") :])["documents"] == 39
    assert main(["stats", out, "--out", str(tmp_path / "page.html")]) == 0
    assert main(["clean", corpus, str(rules), "--out", out, "--workers", "0"]) == 2
    assert main(["stats", corpus, "--out", str(tmp_path / "page.html")]) == 2
    assert main(["init", "clean", "--out", str(rules)]) == 2


@pytest.mark.parametrize("command", ["clean", "dedup"])
def test_a_corpus_of_which_nothing_can_be_read_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the column's name is wrong: exit 2 with the first fault, and nothing is left."""
    path = write_lines(tmp_path / "a.jsonl", ["one", "two"])
    (tmp_path / "RULES.toml").write_text("[unicode]\n")
    rules = [str(tmp_path / "RULES.toml")] if command == "clean" else []
    line = [command, str(path), *rules, "--out", str(tmp_path / "out")]
    assert main([*line, "--text-column", "body"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"ms-data: no document of {path} can be read: {path}:1: ")
    assert "name the text column with --text-column" in said
    assert main([*line, "--text-column", "body", "--strict"]) == 2
    assert "; without --strict it is skipped and reported" in capsys.readouterr().err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["RULES.toml", "a.jsonl"]
