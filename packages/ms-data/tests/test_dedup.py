"""Deduplication keeps one of what is alike, as the slow truth does, in bounded memory."""

import json
import random
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ms_data.deduplication.sorting
import ms_data.engine.batches
from ms_data import DedupOptions, OutputError, SettingError, dedup, draw_stats
from ms_data.cleaning.words import HAN, KANA
from ms_data.cli import main
from ms_data.deduplication.clusters import Cluster, Components, Edges, choose
from ms_data.deduplication.minhash import MinHash, WordHashes
from ms_data.deduplication.sorting import FACTS, RECORD, SPAN, Buckets, repeat_first_record, runs
from ms_data.deduplication.substrings import join_spans
from ms_data.deduplication.windows import Windows, cut_words
from ms_data.ledger.entries import read_ledger
from ms_data.ledger.record import read_record

from .test_build import write_lines
from .test_clean import dying_at, kept_in, ledger_files
from .test_rules import CHINESE, prose


def clusters_of(folder: Path) -> list[Cluster]:
    """The clusters that were written."""
    lines = (folder / "clusters.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Cluster) for line in lines]


def corpus(folder: Path) -> Path:
    """Documents of which some are the same, nearly the same, short, or cannot be read."""
    near = prose(1, 40)
    texts = [
        near,
        prose(2, 40),
        near + " And one more word.",
        prose(2, 40),
        "short",
        "short",
        CHINESE * 3,
        CHINESE * 3 + "完。",
        prose(3, 40),
        prose(2, 40),
    ]
    path = write_lines(folder / "corpus.jsonl", texts)
    with path.open("a") as file:
        file.write('{"text": 3}\n')
    return path


def test_one_of_what_is_alike_is_kept_and_the_ledger_adds_up(tmp_path: Path) -> None:
    """The first stays; the others are dropped as the same or nearly the same text."""
    summary = dedup(corpus(tmp_path), out=tmp_path / "out", workers=1)
    assert summary.dropped == {"exact": 3, "minhash": 2}
    assert (summary.documents, summary.kept, summary.quarantined) == (11, 5, 1)
    assert clusters_of(tmp_path / "out") == [
        Cluster(0, [0, 2]),
        Cluster(1, [1, 3, 9]),
        Cluster(4, [4, 5]),
        Cluster(6, [6, 7]),
    ]
    record = read_record(tmp_path / "out")
    assert record.tally.faults() == []
    entries = list(read_ledger(tmp_path / "out", record))
    assert [one.value for one in entries if one.fate == "dropped"] == [
        f"document {n}" for n in (0, 1, 4, 6, 1)
    ]
    assert len(kept_in(tmp_path / "out")) == 5
    draw_stats(tmp_path / "out", out=tmp_path / "page.html")
    assert "minhash" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep": "first"}, [0, 1, 4, 6]),
        ({"keep": "longest"}, [2, 1, 4, 7]),
        ({"minhash": False}, [1, 4]),
        ({"exact": False}, [0, 1, 4, 6]),
    ],
)
def test_the_kept_one_is_chosen_by_rule(
    tmp_path: Path, options: dict[str, Any], kept: list[int]
) -> None:
    """The first or the longest of a cluster, and only by the ways that are asked for."""
    dedup(corpus(tmp_path), out=tmp_path / "out", options=DedupOptions(**options), workers=1)
    assert [one.kept for one in clusters_of(tmp_path / "out")] == kept


def test_a_source_of_higher_priority_is_kept(tmp_path: Path) -> None:
    """The first pattern that fits decides, whatever the order of the corpus."""
    (tmp_path / "in").mkdir()
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        write_lines(tmp_path / "in" / name, ["the same text in all"])
    options = DedupOptions(keep="priority", priority=["c*", "b*"])
    dedup(tmp_path / "in", out=tmp_path / "out", options=options, workers=1)
    assert clusters_of(tmp_path / "out") == [Cluster(2, [0, 1, 2])]


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.8, 0.9])
def test_signatures_meet_as_often_as_theory_says(similarity: float) -> None:
    """Sets of a known Jaccard similarity share a band as often as 1 - (1 - s**rows)**bands.

    The share over 400 pairs may be off by 4 standard deviations of a fair coin of that chance.
    """
    rng = np.random.default_rng(int(100 * similarity))
    minhash = MinHash(bands=14, rows=8, ngram_words=5)
    pairs, size, met = 400, 300, 0
    shared = round(size * 2 * similarity / (1 + similarity))
    for _ in range(pairs):
        values = rng.integers(0, 2**32, 2 * size - shared, dtype=np.uint32)
        keys, _ = minhash.keys(
            np.stack(
                [
                    minhash.signature_of_ngrams(values[:size]),
                    minhash.signature_of_ngrams(values[size - shared :]),
                ]
            )
        )
        met += bool((keys[0] == keys[1]).any())
    exact = shared / (2 * size - shared)
    chance = 1 - (1 - exact**8) ** 14
    assert abs(met / pairs - chance) <= 4 * (chance * (1 - chance) / pairs) ** 0.5 + 1 / pairs


@pytest.mark.parametrize(("bands", "rows"), [(1, 8), (2, 1), (3, 3), (14, 8)])
def test_no_band_has_two_values_of_one_function(bands: int, rows: int) -> None:
    """A row of a band that tells nothing new would make the band meet too often or too rarely."""
    minhash = MinHash(bands=bands, rows=rows, ngram_words=5)
    ngram = np.array([2**31 + 12345], np.uint32)  # both values of a function are the same here
    for band in minhash.signature_of_ngrams(ngram).reshape(bands, rows):
        assert len(set(band.tolist())) == rows


def test_a_pass_by_other_signatures_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one build beside those of another would meet nothing, and say nothing of it."""
    path = corpus(tmp_path)
    dedup(path, out=tmp_path / "out", workers=1)
    monkeypatch.setattr(sys.modules["ms_data.deduplication.dedup"], "SIGNATURES", 3)
    with pytest.raises(OutputError, match="signatures is 3, was 2"):
        dedup(path, out=tmp_path / "out", workers=1)


def test_case_and_signs_do_not_count_and_words_do() -> None:
    """A signature is of the words of a text alone."""
    minhash = MinHash(bands=14, rows=8, ngram_words=5)
    one = minhash.signature("To be, or not to be: that is the question.")
    assert (one == minhash.signature("to BE or not to be that is - the question")).all()
    assert (one != minhash.signature("to be or not to do that is the question")).any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=12) | st.sampled_from(["word", "Wort,", "你好"]), max_size=12))
def test_hashes_of_words_are_of_the_words_alone(parts: list[str]) -> None:
    """Two words of a text have one hash where they are one word, and only there."""
    text = " ".join(parts)
    found = re.findall(rf"[{HAN}{KANA}]|[^\W_{HAN}{KANA}]+", text.lower())
    words = [word for word in found if word[0].isalnum()]
    hashes = WordHashes()(text).tolist()
    assert len(hashes) == len(words)
    assert len({*zip(hashes, words, strict=True)}) == len(set(words)) == len(set(hashes))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.text(max_size=40)
        | st.sampled_from(["ODOS\u03a3", "a b c d e f g", "你好吗 我很好", "x " * 9000]),
        max_size=8,
    )
)
def test_texts_that_pass_together_have_the_signatures_that_each_has_alone(texts: list[str]) -> None:
    """No word and no n-gram goes from one to the next; neighbors of any length."""
    minhash = MinHash(bands=2, rows=3, ngram_words=3)
    found = minhash.signatures(texts)
    assert found.shape == (len(texts), 6)
    for text, signature in zip(texts, found, strict=True):
        assert (signature == minhash.signature(text)).all()


def test_texts_without_words_are_compared_whole() -> None:
    """Signs alone are alike where they are the same."""
    minhash = MinHash(bands=14, rows=8, ngram_words=5)
    assert (minhash.signature("!!!") == minhash.signature("!!!")).all()
    assert (minhash.signature("!!!") != minhash.signature("---")).any()


@settings(max_examples=60, deadline=None)
@given(
    edges=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=30),
    cut=st.integers(0, 30),
)
def test_clusters_are_those_of_the_slow_truth(
    tmp_path_factory: pytest.TempPathFactory, edges: list[tuple[int, int]], cut: int
) -> None:
    """Labels in a mapped file join what a set of sets joins, however the edges come."""
    folder = tmp_path_factory.mktemp("edges")
    found = Edges(folder / "edges")
    for part in (edges[:cut], edges[cut:]):
        records = np.zeros(2 * len(part), RECORD)
        records["key"] = np.repeat(np.arange(len(part)), 2)
        records["document"] = [end for edge in part for end in sorted(edge)]
        found.add(records)
    joined = Components(folder / "labels", 20)
    joined.join(found)
    sets = [{n} for n in range(20)]
    for one, other in edges:
        if sets[one] is not sets[other]:
            sets[one] |= sets[other]
            for n in sets[other]:
                sets[n] = sets[one]
    assert joined.labels.tolist() == [min(one) for one in sets]


@settings(max_examples=40, deadline=None)
@given(
    keys=st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 3), max_size=60),
    files=st.sampled_from([1, 16, 300]),
)
def test_sorting_in_files_is_sorting(
    tmp_path_factory: pytest.TempPathFactory, keys: list[int], files: int
) -> None:
    """All records come once, by key, and those of a key in the order of adding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ms_data.deduplication.sorting, "MEMORY_BYTES", 1)
        patch.setattr(ms_data.deduplication.sorting, "BUFFER_BYTES", 100)
        buckets = Buckets(tmp_path_factory.mktemp("sort") / "b", RECORD, files)
        records = np.zeros(len(keys), RECORD)
        records["key"], records["document"] = keys, range(len(keys))
        for start in range(0, len(keys), 7):
            buckets.add(records[start : start + 7])
        parts = list(buckets.sorted())
    found = [one for part in parts for one in part.tolist()]
    assert found == sorted(records.tolist(), key=lambda one: one[0])


@settings(max_examples=40, deadline=None)
@given(keys=st.lists(st.integers(0, 3) | st.integers(0, 9), max_size=80))
def test_a_key_of_more_records_than_memory_holds_is_given_in_parts(
    tmp_path_factory: pytest.TempPathFactory, keys: list[int]
) -> None:
    """A part holds four records, or is of one key; joined and cut as if each key came whole."""
    folder = tmp_path_factory.mktemp("parts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ms_data.deduplication.sorting, "MEMORY_BYTES", 4 * RECORD.itemsize)
        buckets = Buckets(folder / "b", RECORD, 1)
        records = np.zeros(len(keys), RECORD)
        records["key"], records["document"] = keys, range(len(keys))
        buckets.add(records)
        parts = list(buckets.sorted())
    assert [one for part in parts for one in part["document"].tolist()] == sorted(
        range(len(keys)), key=lambda n: keys[n]
    )
    assert all(len(part) <= 8 for part in parts)  # a file of two parts is not cut
    edges = Edges(folder / "edges")
    for part in repeat_first_record(parts):
        edges.add(part)
    joined = Components(folder / "labels", len(keys))
    joined.join(edges)
    assert joined.labels.tolist() == [keys.index(key) for key in keys]


@settings(max_examples=60, deadline=None)
@given(
    found=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 5)),
        min_size=1,
        max_size=30,
    )
)
def test_spans_that_meet_are_written_as_one(found: list[tuple[int, int, int]]) -> None:
    """They hold the same words of the same documents, and none meets the next."""
    spans = np.zeros(len(found), SPAN)
    for span, (document, first, length) in zip(spans, found, strict=True):
        span["key"], span["first"], span["end"] = document << 60, first, first + length
    joined = [tuple(one) for one in join_spans(spans).tolist()]
    held = [{(key, n) for n in range(first, end)} for key, first, end in joined]
    assert set().union(*held) == {
        (document << 60, n)
        for document, first, length in found
        for n in range(first, first + length)
    }
    for (key, _, end), (other, first, _) in pairwise(joined):
        assert (key, end) < (other, first)


@settings(max_examples=60, deadline=None)
@given(
    sets=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    sizes=st.lists(st.integers(0, 3), min_size=30, max_size=30),
    keep=st.sampled_from(["first", "longest", "priority"]),
)
def test_the_kept_one_is_that_of_the_slow_truth(
    tmp_path_factory: pytest.TempPathFactory, sets: list[int], sizes: list[int], keep: Any
) -> None:
    """Whatever the clusters' sizes: of the best ones the first; clusters by their first ones."""
    labels = np.array([sets.index(one) for one in sets], np.uint32)
    facts = np.zeros(len(sets), FACTS)
    facts["size"] = facts["rank"] = sizes[: len(sets)]
    folder = tmp_path_factory.mktemp("choose")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ms_data.deduplication.sorting, "MEMORY_BYTES", 64)
        found = list(choose(folder, labels, facts, DedupOptions(keep=keep)))
    best = {"first": lambda n: n, "longest": lambda n: -sizes[n], "priority": lambda n: sizes[n]}
    clusters = [
        [n for n, one in enumerate(labels) if one == label] for label in sorted(set(labels))
    ]
    wanted = [
        Cluster(min(one, key=lambda n: (best[keep](n), n)), one) for one in clusters if len(one) > 1
    ]
    assert [msgspec.json.decode(b"".join(one.lines()), type=Cluster) for one in found] == wanted


def test_runs_agree_in_every_field() -> None:
    """A run begins wherever one of the fields changes."""
    records = np.array([(1, 0, 5), (1, 0, 6), (1, 1, 7), (2, 1, 8), (2, 1, 9)], RECORD)
    assert runs(records, "key", "check").tolist() == [0, 0, 2, 3, 3]


def slow_cut(texts: list[str], words: int) -> list[str]:
    """Cuts rows of words that stood before, word by word; words are letters."""
    seen: dict[tuple[str, ...], tuple[int, int]] = {}
    left = []
    for number, text in enumerate(texts):
        found = text.split()
        gone = set()
        for at in range(len(found) - words + 1):
            row = tuple(found[at : at + words])
            document, first = seen.setdefault(row, (number, at))
            if (document, first) != (number, at):
                start = max(at, first + words) if document == number else at
                gone |= set(range(start, at + words))
        left.append(" ".join(word for at, word in enumerate(found) if at not in gone))
    return [text for text in left if text]


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(
        st.lists(st.sampled_from("abc"), min_size=1, max_size=25).map(" ".join),
        min_size=1,
        max_size=5,
    ),
    words=st.integers(1, 5),
)
def test_rows_of_words_that_stood_before_are_cut(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], words: int
) -> None:
    """What is left is what the slow truth leaves; where rows overlap, the first stays."""
    folder = tmp_path_factory.mktemp("cut")
    options = DedupOptions(exact=False, minhash=False, substring_words=words)
    dedup(write_lines(folder / "a.jsonl", texts), out=folder / "out", options=options, workers=1)
    assert [" ".join(one.split()) for one in kept_in(folder / "out")] == slow_cut(texts, words)


def test_a_document_that_is_dropped_takes_nothing_from_others(tmp_path: Path) -> None:
    """Rows of words count where they are kept alone."""
    texts = ["a b c d e f", "a b c d e f", "x a b c d e f y"]
    options = DedupOptions(minhash=False, substring_words=4, keep="first")
    path = write_lines(tmp_path / "a.jsonl", texts)
    summary = dedup(path, out=tmp_path / "out", options=options, workers=1)
    assert summary.dropped == {"exact": 1}
    assert kept_in(tmp_path / "out") == ["a b c d e f", "x y"]


def test_windows_of_the_same_words_have_the_same_hash_anywhere() -> None:
    """A row's hash does not depend on its place; other rows have others."""
    rng = random.Random(3)
    words = [f"w{rng.randrange(9)}" for _ in range(200)]
    keys = Windows(6).keys(" ".join(words)).tolist()
    rows = [tuple(words[at : at + 6]) for at in range(195)]
    assert len(keys) == len(rows)
    assert len({*zip(keys, rows, strict=True)}) == len(set(rows)) == len(set(keys))


def test_cutting_keeps_signs_and_spaces_of_what_stays() -> None:
    """A row goes with what stands behind its words."""
    assert cut_words("One, two; three. Four!", [(1, 3)]) == "One, Four!"
    assert cut_words("你好世界。", [(0, 2)]) == "世界。"


def test_the_bytes_do_not_depend_on_processes_or_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process or two, one file of hashes or many: all is the same."""
    monkeypatch.setattr(ms_data.engine.batches, "BATCH_CHARACTERS", 1000)
    path, options = corpus(tmp_path), DedupOptions(substring_words=6)
    dedup(path, out=tmp_path / "one", options=options, workers=1)
    monkeypatch.setattr(ms_data.deduplication.sorting, "MEMORY_BYTES", 64)
    dedup(path, out=tmp_path / "two", options=options, workers=2)
    assert ledger_files(tmp_path / "one") == ledger_files(tmp_path / "two")


def test_a_kill_at_any_write_sync_or_rename_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command again ends in the bytes of a calm run, wherever it was killed."""
    monkeypatch.setattr(ms_data.engine.batches, "BATCH_CHARACTERS", 8000)
    path, options = corpus(tmp_path), DedupOptions(substring_words=6)
    dedup(path, out=tmp_path / "calm", options=options, workers=1)
    calm = ledger_files(tmp_path / "calm")
    for event in range(1, 200, 5):
        out = tmp_path / f"out{event}"

        def run(out: Path = out) -> None:
            dedup(path, out=out, options=options, workers=1)

        status = dying_at(event, run)
        assert status in (0, signal.SIGKILL)
        run()
        assert ledger_files(out) == calm
        if not status:
            break
    assert event > 30


def test_the_command_deduplicates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints what it did, and refuses what cannot be used in one line."""
    path, out = str(corpus(tmp_path)), str(tmp_path / "out")
    assert main(["dedup", path, "--out", out, "--workers", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] == 5
    assert main(["dedup", path, "--out", out, "--workers", "1", "--keep", "longest"]) == 2
    assert "keep is 'longest', was 'first'" in capsys.readouterr().err
    assert main(["dedup", path, "--out", f"{out}2", "--bands", "0"]) == 2
    assert "bands" in capsys.readouterr().err


def test_looking_for_nothing_is_refused(tmp_path: Path) -> None:
    """Without exact, MinHash and rows of words there is nothing to do."""
    options = DedupOptions(exact=False, minhash=False)
    with pytest.raises(SettingError, match="no criterion is enabled"):
        dedup(corpus(tmp_path), out=tmp_path / "out", options=options)


@pytest.mark.slow
def test_rows_that_every_document_repeats_take_no_more_memory(tmp_path: Path) -> None:
    """A million equal words in each of 4 documents or 40; peak memory, of all processes."""
    script = (
        "import re, resource, sys; from ms_data import DedupOptions, dedup\n"
        "options = DedupOptions(substring_words=50)\n"
        "dedup(sys.argv[1], out=sys.argv[2], options=options, workers=1)\n"
        # ru_maxrss begins with that of the process that started this one.
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1],\n"
        "      resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    peaks = []
    for count in (4, 40):
        rng = random.Random(count)
        texts = [" ".join(f"w{rng.randrange(10**7)}" for _ in range(900)) for _ in range(count)]
        path = write_lines(tmp_path / f"{count}.jsonl", [f"{one} {'0 ' * 10**6}" for one in texts])
        command = [sys.executable, "-c", script, path, tmp_path / f"out{count}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append([int(one) >> 10 for one in done.stdout.split()])
        assert [len(text.split()) for text in kept_in(tmp_path / f"out{count}")] == [
            900 + 50 * (not n) for n in range(count)
        ]
    assert all(large < small + 200 for small, large in zip(*peaks, strict=True)), peaks
