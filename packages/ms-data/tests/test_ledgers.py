"""In every command, what went in is what came out and what did not, by reason."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_data import (
    CorpusError,
    DedupOptions,
    Tokenizer,
    build,
    clean,
    dedup,
    export_dataset,
    import_dataset,
    inspect,
    train_tokenizer,
)
from ms_data.corpus.find import find_corpus
from ms_data.ledger.entries import read_ledger
from ms_data.ledger.record import read_record

from .test_build import texts_of, write_lines
from .test_clean import kept_in
from .test_exchange import write_mds, write_pair
from .test_rules import CHINESE, prose

LINES = st.lists(
    st.text(max_size=60).map(lambda text: json.dumps({"text": text}))
    | st.sampled_from([prose(3), prose(3) + ".", CHINESE, "", "a b a b a b a b"]).map(
        lambda text: json.dumps({"text": text})
    )
    | st.sampled_from(
        ["", "  ", "no JSON", '{"other": 1}', '{"text": null}', '{"text": "\\ud800"}']
    ),
    min_size=1,
    max_size=14,
)
"""Rows of text, rows without, blank lines, and lines that cannot be read."""


def fate_of(line: str) -> str:
    """The slow truth: whether a line is a document, empty, or cannot be read."""
    if not line.strip():
        return "empty"
    try:
        text = json.loads(line)["text"]
        text.encode()
    except (ValueError, KeyError, AttributeError):
        return "unreadable"
    return "document" if text else "empty"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small one."""
    lines = write_lines(tmp_path_factory.mktemp("t") / "a.jsonl", texts_of(1, 20))
    return train_tokenizer(lines, vocab_size=300)


def check_ledger(out: Path, summary: Any, fates: Counter[str]) -> None:
    """The sums, the lines of the ledger and the documents that are there say the same."""
    record = read_record(out)
    assert record.tally.faults() == []
    assert summary.documents == fates["document"] + fates["unreadable"]
    assert (summary.quarantined, summary.empty) == (fates["unreadable"], fates["empty"])
    assert summary.documents == summary.kept + sum(summary.dropped.values()) + summary.quarantined
    entries = list(read_ledger(out, record))
    assert [entry.document for entry in entries] == list(range(summary.documents))
    assert Counter(one.reason for one in entries if one.fate == "dropped") == summary.dropped
    kept = kept_in(out)
    assert len(kept) == summary.kept
    assert sum(len(text.encode()) for text in kept) == summary.bytes_out
    for one in entries:
        taken = one.bytes_in if one.fate == "dropped" else sum(one.changes.values())
        assert one.bytes_in == one.bytes_out + taken


RULES = (
    *("unicode", "control_characters", "language", "chinese_text", "gopher_repetition"),
    *("gopher_quality", "c4_quality", "c4_paragraphs", "fineweb_quality", "chinese_quality"),
    *("personal_data", "decontaminate"),
)


@settings(max_examples=25, deadline=None)
@given(lines=LINES, names=st.lists(st.sampled_from(RULES), min_size=1, max_size=4, unique=True))
def test_cleaning_adds_up(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], names: list[str]
) -> None:
    """Whatever the lines and rules."""
    folder = tmp_path_factory.mktemp("clean")
    (folder / "a.jsonl").write_text("\n".join([*lines, json.dumps({"text": "a"})]))
    benchmark = write_lines(folder / "benchmark.jsonl", [prose(3)])
    settings: dict[str, dict[str, Any]] = {"decontaminate": {"benchmarks": str(benchmark)}}
    rules = {name: settings.get(name, {}) for name in names}
    summary = clean(folder / "a.jsonl", rules, out=folder / "out", workers=1)
    check_ledger(folder / "out", summary, Counter(["document", *map(fate_of, lines)]))


@settings(max_examples=25, deadline=None)
@given(
    lines=LINES,
    words=st.sampled_from([0, 2, 5]),
    exact=st.booleans(),
    keep=st.sampled_from(["first", "longest"]),
)
def test_deduplicating_adds_up(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], words: int, exact: bool, keep: Any
) -> None:
    """Whatever the lines and ways."""
    folder = tmp_path_factory.mktemp("dedup")
    (folder / "a.jsonl").write_text("\n".join([*lines, json.dumps({"text": "a"})]))
    options = DedupOptions(exact=exact, substring_words=words, keep=keep)
    summary = dedup(folder / "a.jsonl", out=folder / "out", options=options, workers=1)
    check_ledger(folder / "out", summary, Counter(["document", *map(fate_of, lines)]))


@settings(max_examples=25, deadline=None)
@given(lines=LINES, held_out_fraction=st.sampled_from([0.0, 0.5]))
def test_building_adds_up(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Tokenizer,
    lines: list[str],
    held_out_fraction: float,
) -> None:
    """Lines are documents of a split, left out, or without text."""
    folder = tmp_path_factory.mktemp("build")
    (folder / "a.jsonl").write_text("\n".join([*lines, json.dumps({"text": "a"})]))
    summary = build(
        folder / "a.jsonl",
        tokenizer=tokenizer,
        out=folder / "out",
        held_out_fraction=held_out_fraction,
        skip_invalid=True,
    )
    fates = Counter(["document", *map(fate_of, lines)])
    assert summary.documents == fates["document"]
    assert (summary.skipped, summary.empty) == (fates["unreadable"], fates["empty"])
    splits = inspect(folder / "out").splits.values()
    assert sum(split.documents for split in splits) == summary.documents
    assert sum(split.tokens for split in splits) == summary.tokens == sum(summary.splits.values())


@settings(max_examples=25, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=3), min_size=1, max_size=6
    )
)
def test_an_import_of_megatrons_adds_up(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Tokenizer,
    documents: list[list[list[int]]],
) -> None:
    """Documents without a token, and those that hold an end of text in their midst."""
    folder = tmp_path_factory.mktemp("import")
    path = write_pair(folder / "x", documents)
    if not any(map(any, documents)):
        with pytest.raises(CorpusError, match="empty"):
            import_dataset(path, tokenizer=tokenizer, out=folder / "out")
        return
    made = import_dataset(path, tokenizer=tokenizer, out=folder / "out")
    written = made.splits["train"].documents
    assert made.documents_in == len(documents)
    assert made.empty == sum(not any(document) for document in documents)
    assert written == made.documents_in - made.empty + made.further
    again = export_dataset(folder / "out", out=folder / "y", target="megatron")
    assert (again.documents, again.tokens) == (written, made.splits["train"].tokens)


@settings(max_examples=15, deadline=None)
@given(texts=st.lists(st.text(max_size=20), max_size=8))
def test_an_import_of_mds_adds_up(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, texts: list[str]
) -> None:
    """Rows of text, of which some are empty."""
    folder = tmp_path_factory.mktemp("mds")
    rows = [{"text": text.encode()} for text in [*texts, "a"]]
    mds = write_mds(folder / "mds", rows, {"text": ("str", None)})
    made = import_dataset(mds, tokenizer=tokenizer, out=folder / "out")
    assert (made.documents_in, made.empty, made.further) == (len(rows), texts.count(""), 0)
    assert made.splits["train"].documents == made.documents_in - made.empty


def test_what_was_empty_before_a_kill_is_counted_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """An array of jobs, which reads all in each of them, counts it once too."""
    lines = [json.dumps({"text": text}) for text in ("", "one", "", "two", "")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    for shard in (None, "1/2", "2/2", "merge/2"):
        out = tmp_path / f"out{shard is None}"
        made = build(tmp_path / "a.jsonl", tokenizer=tokenizer, out=out, shard=shard)
        cleaned = clean(tmp_path / "a.jsonl", {"unicode": {}}, out=f"{out}.c", shard=shard)
        if shard in (None, "merge/2"):
            assert (made.documents, made.empty) == (cleaned.documents, cleaned.empty) == (2, 4)


@pytest.mark.slow
def test_the_ledgers_of_real_corpora_add_up(tmp_path: Path) -> None:
    """The standard library: cleaned by all published rules, deduplicated, built, out and in."""
    files = clean("stdlib", {"control_characters": {}, "personal_data": {}}, out=tmp_path / "all")
    known = Counter(
        document=files.documents - files.quarantined,
        unreadable=files.quarantined,
        empty=files.empty,
    )
    check_ledger(tmp_path / "all", files, known)
    assert known.total() == len(find_corpus("stdlib").files)
    published = ("gopher_repetition", "gopher_quality", "c4_quality", "fineweb_quality")
    for name in (*published, "c4_paragraphs", "language"):
        made = clean(tmp_path / "all", {name: {}}, out=tmp_path / name)
        check_ledger(tmp_path / name, made, Counter(document=files.kept))
    unique = dedup(
        tmp_path / "all", out=tmp_path / "unique", options=DedupOptions(substring_words=50)
    )
    check_ledger(tmp_path / "unique", unique, Counter(document=files.kept))
    assert unique.dropped
    tokenizer = train_tokenizer(tmp_path / "unique", vocab_size=2048)
    built = build(tmp_path / "unique", tokenizer=tokenizer, out=tmp_path / "shards")
    assert (built.documents, built.text_bytes) == (unique.kept, unique.bytes_out)
    out = export_dataset(tmp_path / "shards", out=tmp_path / "pair", target="megatron")
    back = import_dataset(tmp_path / "pair.idx", tokenizer=tokenizer, out=tmp_path / "back")
    assert (back.documents_in, back.empty, back.further) == (out.documents, 0, 0)
    assert out.documents == built.documents == back.splits["train"].documents
    assert out.tokens == built.tokens == back.splits["train"].tokens
