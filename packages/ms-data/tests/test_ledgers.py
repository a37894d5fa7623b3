"""For every command, the input equals the output plus the dropped documents by reason."""

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

from .test_build import random_texts, write_lines
from .test_clean import kept_texts
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
"""Rows with and without text, blank lines, and unreadable lines."""


def classify_line(line: str) -> str:
    """Classify a line as a document, empty or unreadable."""
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
    """A small BPE tokenizer."""
    lines = write_lines(tmp_path_factory.mktemp("t") / "a.jsonl", random_texts(1, 20))
    return train_tokenizer(lines, vocab_size=300)


def check_ledger(out: Path, summary: Any, expected: Counter[str]) -> None:
    """Check that totals, ledger entries and written documents agree."""
    record = read_record(out)
    assert record.tally.faults() == []
    assert summary.documents == expected["document"] + expected["unreadable"]
    assert (summary.quarantined, summary.empty) == (expected["unreadable"], expected["empty"])
    assert summary.documents == summary.kept + sum(summary.dropped.values()) + summary.quarantined
    entries = list(read_ledger(out, record))
    assert [entry.document for entry in entries] == list(range(summary.documents))
    assert Counter(entry.reason for entry in entries if entry.fate == "dropped") == summary.dropped
    texts = kept_texts(out)
    assert len(texts) == summary.kept
    assert sum(len(text.encode()) for text in texts) == summary.bytes_out
    for line in entries:
        removed = line.bytes_in if line.fate == "dropped" else sum(line.changes.values())
        assert line.bytes_in == line.bytes_out + removed


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
    """For any lines and rules."""
    folder = tmp_path_factory.mktemp("clean")
    (folder / "a.jsonl").write_text("\n".join([*lines, json.dumps({"text": "a"})]))
    benchmark = write_lines(folder / "benchmark.jsonl", [prose(3)])
    settings: dict[str, dict[str, Any]] = {"decontaminate": {"benchmarks": str(benchmark)}}
    rules = {name: settings.get(name, {}) for name in names}
    summary = clean(folder / "a.jsonl", rules, out=folder / "out", workers=1)
    check_ledger(folder / "out", summary, Counter(["document", *map(classify_line, lines)]))


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
    """For any lines and options."""
    folder = tmp_path_factory.mktemp("dedup")
    (folder / "a.jsonl").write_text("\n".join([*lines, json.dumps({"text": "a"})]))
    options = DedupOptions(exact=exact, substring_words=words, keep=keep)
    summary = dedup(folder / "a.jsonl", out=folder / "out", options=options, workers=1)
    check_ledger(folder / "out", summary, Counter(["document", *map(classify_line, lines)]))


@settings(max_examples=25, deadline=None)
@given(lines=LINES, held_out_fraction=st.sampled_from([0.0, 0.5]))
def test_building_adds_up(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Tokenizer,
    lines: list[str],
    held_out_fraction: float,
) -> None:
    """Every line is a document of a split, skipped, or empty."""
    folder = tmp_path_factory.mktemp("build")
    (folder / "a.jsonl").write_text("\n".join([*lines, json.dumps({"text": "a"})]))
    summary = build(
        folder / "a.jsonl",
        tokenizer=tokenizer,
        out=folder / "out",
        held_out_fraction=held_out_fraction,
        skip_invalid=True,
    )
    expected = Counter(["document", *map(classify_line, lines)])
    assert summary.documents == expected["document"]
    assert (summary.skipped, summary.empty) == (expected["unreadable"], expected["empty"])
    splits = inspect(folder / "out").splits.values()
    assert sum(split.documents for split in splits) == summary.documents
    assert sum(split.tokens for split in splits) == summary.tokens == sum(summary.splits.values())


@settings(max_examples=25, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=3), min_size=1, max_size=6
    )
)
def test_megatron_imports_add_up(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Tokenizer,
    documents: list[list[list[int]]],
) -> None:
    """Includes empty documents and documents with inner end-of-text tokens."""
    folder = tmp_path_factory.mktemp("import")
    path = write_pair(folder / "x", documents)
    if not any(map(any, documents)):
        with pytest.raises(CorpusError, match="empty"):
            import_dataset(path, tokenizer=tokenizer, out=folder / "out")
        return
    summary = import_dataset(path, tokenizer=tokenizer, out=folder / "out")
    written = summary.splits["train"].documents
    assert summary.documents_in == len(documents)
    assert summary.empty == sum(not any(document) for document in documents)
    assert written == summary.documents_in - summary.empty + summary.further
    exported = export_dataset(folder / "out", out=folder / "y", target="megatron")
    assert (exported.documents, exported.tokens) == (written, summary.splits["train"].tokens)


@settings(max_examples=15, deadline=None)
@given(texts=st.lists(st.text(max_size=20), max_size=8))
def test_mds_imports_add_up(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, texts: list[str]
) -> None:
    """Some rows are empty."""
    folder = tmp_path_factory.mktemp("mds")
    rows = [{"text": text.encode()} for text in [*texts, "a"]]
    mds = write_mds(folder / "mds", rows, {"text": ("str", None)})
    summary = import_dataset(mds, tokenizer=tokenizer, out=folder / "out")
    assert (summary.documents_in, summary.empty, summary.further) == (len(rows), texts.count(""), 0)
    assert summary.splits["train"].documents == summary.documents_in - summary.empty


def test_empty_documents_are_counted_once_across_array_jobs(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Every job reads the complete corpus."""
    lines = [json.dumps({"text": text}) for text in ("", "one", "", "two", "")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    for shard in (None, "1/2", "2/2", "merge/2"):
        out = tmp_path / f"out{shard is None}"
        built = build(tmp_path / "a.jsonl", tokenizer=tokenizer, out=out, shard=shard)
        cleaned = clean(tmp_path / "a.jsonl", {"unicode": {}}, out=f"{out}.c", shard=shard)
        if shard in (None, "merge/2"):
            assert (built.documents, built.empty) == (cleaned.documents, cleaned.empty) == (2, 4)


@pytest.mark.slow
def test_ledgers_of_the_standard_library_add_up(tmp_path: Path) -> None:
    """Cleaned with all published rules, deduplicated, built, exported and imported."""
    files = clean("stdlib", {"control_characters": {}, "personal_data": {}}, out=tmp_path / "all")
    expected = Counter(
        document=files.documents - files.quarantined,
        unreadable=files.quarantined,
        empty=files.empty,
    )
    check_ledger(tmp_path / "all", files, expected)
    assert expected.total() == len(find_corpus("stdlib").files)
    published = ("gopher_repetition", "gopher_quality", "c4_quality", "fineweb_quality")
    for name in (*published, "c4_paragraphs", "language"):
        summary = clean(tmp_path / "all", {name: {}}, out=tmp_path / name)
        check_ledger(tmp_path / name, summary, Counter(document=files.kept))
    unique = dedup(
        tmp_path / "all", out=tmp_path / "unique", options=DedupOptions(substring_words=50)
    )
    check_ledger(tmp_path / "unique", unique, Counter(document=files.kept))
    assert unique.dropped
    tokenizer = train_tokenizer(tmp_path / "unique", vocab_size=2048)
    built = build(tmp_path / "unique", tokenizer=tokenizer, out=tmp_path / "shards")
    assert (built.documents, built.text_bytes) == (unique.kept, unique.bytes_out)
    exported = export_dataset(tmp_path / "shards", out=tmp_path / "pair", target="megatron")
    imported = import_dataset(tmp_path / "pair.idx", tokenizer=tokenizer, out=tmp_path / "back")
    assert (imported.documents_in, imported.empty, imported.further) == (exported.documents, 0, 0)
    assert exported.documents == built.documents == imported.splits["train"].documents
    assert exported.tokens == built.tokens == imported.splits["train"].tokens
