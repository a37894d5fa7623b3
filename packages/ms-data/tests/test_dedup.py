"""Deduplication keeps one document per cluster, matches slow references and bounds its memory."""

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
from ms_data.deduplication.sorting import DOCUMENT, RECORD, SPAN, Buckets, repeat_first_record, runs
from ms_data.deduplication.substrings import join_spans
from ms_data.deduplication.windows import WindowHasher, cut_words
from ms_data.ledger.entries import read_ledger
from ms_data.ledger.record import read_record

from .test_build import write_lines
from .test_clean import kept_texts, read_tree, run_and_die_at
from .test_rules import CHINESE, prose


def read_clusters(folder: Path) -> list[Cluster]:
    """Read the clusters that a run wrote."""
    lines = (folder / "clusters.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Cluster) for line in lines]


def write_corpus(folder: Path) -> Path:
    """Write exact duplicates, near-duplicates, short documents and one unreadable line."""
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


def test_exact_and_near_duplicates_are_dropped_and_the_ledger_adds_up(tmp_path: Path) -> None:
    summary = dedup(write_corpus(tmp_path), out=tmp_path / "out", workers=1)
    assert summary.dropped == {"exact": 3, "minhash": 2}
    assert (summary.documents, summary.kept, summary.quarantined) == (11, 5, 1)
    assert read_clusters(tmp_path / "out") == [
        Cluster(0, [0, 2]),
        Cluster(1, [1, 3, 9]),
        Cluster(4, [4, 5]),
        Cluster(6, [6, 7]),
    ]
    record = read_record(tmp_path / "out")
    assert record.tally.faults() == []
    entries = list(read_ledger(tmp_path / "out", record))
    assert [entry.value for entry in entries if entry.fate == "dropped"] == [
        f"document {n}" for n in (0, 1, 4, 6, 1)
    ]
    assert len(kept_texts(tmp_path / "out")) == 5
    draw_stats(tmp_path / "out", out=tmp_path / "page.html")
    assert "minhash" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keep": "first"}, [0, 1, 4, 6]),
        ({"keep": "longest"}, [2, 1, 4, 7]),
        ({"minhash": False}, [1, 4]),
        ({"exact": False}, [0, 1, 4, 6]),
    ],
)
def test_the_kept_document_depends_on_the_options(
    tmp_path: Path, options: dict[str, Any], expected: list[int]
) -> None:
    """`keep` selects the first or longest document of a cluster; disabled criteria find nothing."""
    dedup(write_corpus(tmp_path), out=tmp_path / "out", options=DedupOptions(**options), workers=1)
    assert [cluster.kept for cluster in read_clusters(tmp_path / "out")] == expected


def test_keep_priority_prefers_the_first_matching_pattern(tmp_path: Path) -> None:
    """The order of the corpus does not matter."""
    (tmp_path / "in").mkdir()
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        write_lines(tmp_path / "in" / name, ["the same text in all"])
    options = DedupOptions(keep="priority", priority=["c*", "b*"])
    dedup(tmp_path / "in", out=tmp_path / "out", options=options, workers=1)
    assert read_clusters(tmp_path / "out") == [Cluster(2, [0, 1, 2])]


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.8, 0.9])
def test_lsh_match_rate_follows_the_banding_formula(similarity: float) -> None:
    """Sets of Jaccard similarity s share a band with probability 1 - (1 - s**rows)**bands.

    The rate over 400 pairs may differ by 4 standard deviations.
    """
    rng = np.random.default_rng(int(100 * similarity))
    minhash = MinHash(bands=14, rows=8, ngram_words=5)
    pairs, size, matches = 400, 300, 0
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
        matches += bool((keys[0] == keys[1]).any())
    exact = shared / (2 * size - shared)
    chance = 1 - (1 - exact**8) ** 14
    assert abs(matches / pairs - chance) <= 4 * (chance * (1 - chance) / pairs) ** 0.5 + 1 / pairs


@pytest.mark.parametrize(("bands", "rows"), [(1, 8), (2, 1), (3, 3), (14, 8)])
def test_every_row_of_a_band_uses_a_different_hash_function(bands: int, rows: int) -> None:
    """A repeated function would shift the match rate of its band."""
    minhash = MinHash(bands=bands, rows=rows, ngram_words=5)
    ngram = np.array([2**31 + 12345], np.uint32)  # both values of a function coincide here
    for band in minhash.signature_of_ngrams(ngram).reshape(bands, rows):
        assert len(set(band.tolist())) == rows


def test_a_run_with_another_signature_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signatures of different versions would never match, silently."""
    path = write_corpus(tmp_path)
    dedup(path, out=tmp_path / "out", workers=1)
    monkeypatch.setattr(sys.modules["ms_data.deduplication.dedup"], "SIGNATURES", 3)
    with pytest.raises(OutputError, match="signatures is 3, was 2"):
        dedup(path, out=tmp_path / "out", workers=1)


def test_signatures_ignore_case_and_punctuation() -> None:
    minhash = MinHash(bands=14, rows=8, ngram_words=5)
    signature = minhash.signature("To be, or not to be: that is the question.")
    assert (signature == minhash.signature("to BE or not to be that is - the question")).all()
    assert (signature != minhash.signature("to be or not to do that is the question")).any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=12) | st.sampled_from(["word", "Wort,", "你好"]), max_size=12))
def test_word_hashes_are_equal_exactly_for_equal_words(parts: list[str]) -> None:
    text = " ".join(parts)
    tokens = re.findall(rf"[{HAN}{KANA}]|[^\W_{HAN}{KANA}]+", text.lower())
    words = [word for word in tokens if word[0].isalnum()]
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
def test_batched_signatures_equal_single_ones(texts: list[str]) -> None:
    """N-grams never span two texts of a batch, for texts of any length."""
    minhash = MinHash(bands=2, rows=3, ngram_words=3)
    signatures = minhash.signatures(texts)
    assert signatures.shape == (len(texts), 6)
    for text, signature in zip(texts, signatures, strict=True):
        assert (signature == minhash.signature(text)).all()


def test_texts_without_words_match_only_if_identical() -> None:
    minhash = MinHash(bands=14, rows=8, ngram_words=5)
    assert (minhash.signature("!!!") == minhash.signature("!!!")).all()
    assert (minhash.signature("!!!") != minhash.signature("---")).any()


@settings(max_examples=60, deadline=None)
@given(
    edges=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=30),
    cut=st.integers(0, 30),
)
def test_clusters_match_a_set_based_union(
    tmp_path_factory: pytest.TempPathFactory, edges: list[tuple[int, int]], cut: int
) -> None:
    """The order and batching of the edges do not matter."""
    folder = tmp_path_factory.mktemp("edges")
    edge_file = Edges(folder / "edges")
    for part in (edges[:cut], edges[cut:]):
        records = np.zeros(2 * len(part), RECORD)
        records["key"] = np.repeat(np.arange(len(part)), 2)
        records["document"] = [end for edge in part for end in sorted(edge)]
        edge_file.add(records)
    components = Components(folder / "labels", 20)
    components.join(edge_file)
    sets = [{n} for n in range(20)]
    for a, b in edges:
        if sets[a] is not sets[b]:
            sets[a] |= sets[b]
            for n in sets[b]:
                sets[n] = sets[a]
    assert components.labels.tolist() == [min(a) for a in sets]


@settings(max_examples=40, deadline=None)
@given(
    keys=st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 3), max_size=60),
    files=st.sampled_from([1, 16, 300]),
)
def test_external_sort_matches_sorted(
    tmp_path_factory: pytest.TempPathFactory, keys: list[int], files: int
) -> None:
    """Records come once, ordered by key, and in insertion order within a key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ms_data.deduplication.sorting, "MEMORY_BYTES", 1)
        patch.setattr(ms_data.deduplication.sorting, "BUFFER_BYTES", 100)
        buckets = Buckets(tmp_path_factory.mktemp("sort") / "b", RECORD, files)
        records = np.zeros(len(keys), RECORD)
        records["key"], records["document"] = keys, range(len(keys))
        for start in range(0, len(keys), 7):
            buckets.add(records[start : start + 7])
        parts = list(buckets.sorted())
    actual = [record for part in parts for record in part.tolist()]
    assert actual == sorted(records.tolist(), key=lambda record: record[0])


@settings(max_examples=40, deadline=None)
@given(keys=st.lists(st.integers(0, 3) | st.integers(0, 9), max_size=80))
def test_a_key_with_more_records_than_fit_in_memory_is_split_into_parts(
    tmp_path_factory: pytest.TempPathFactory, keys: list[int]
) -> None:
    """Components match unsplit keys. A part holds four records or a single key."""
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
    assert all(len(part) <= 8 for part in parts)  # a file of two parts is not split
    edges = Edges(folder / "edges")
    for part in repeat_first_record(parts):
        edges.add(part)
    components = Components(folder / "labels", len(keys))
    components.join(edges)
    assert components.labels.tolist() == [keys.index(key) for key in keys]


@settings(max_examples=60, deadline=None)
@given(
    inputs=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 5)),
        min_size=1,
        max_size=30,
    )
)
def test_adjacent_and_overlapping_spans_are_merged(inputs: list[tuple[int, int, int]]) -> None:
    """Merged spans cover the same words, and do not touch each other."""
    spans = np.zeros(len(inputs), SPAN)
    for span, (document, first, length) in zip(spans, inputs, strict=True):
        span["key"], span["first"], span["end"] = document << 60, first, first + length
    joined = [tuple(row) for row in join_spans(spans).tolist()]
    covered = [{(key, n) for n in range(first, end)} for key, first, end in joined]
    assert set().union(*covered) == {
        (document << 60, n)
        for document, first, length in inputs
        for n in range(first, first + length)
    }
    for (key, _, end), (next_key, first, _) in pairwise(joined):
        assert (key, end) < (next_key, first)


@settings(max_examples=60, deadline=None)
@given(
    sets=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    sizes=st.lists(st.integers(0, 3), min_size=30, max_size=30),
    keep=st.sampled_from(["first", "longest", "priority"]),
)
def test_the_kept_document_matches_a_brute_force_choice(
    tmp_path_factory: pytest.TempPathFactory, sets: list[int], sizes: list[int], keep: Any
) -> None:
    """Ties go to the first document; clusters are ordered by their first member."""
    labels = np.array([sets.index(label) for label in sets], np.uint32)
    facts = np.zeros(len(sets), DOCUMENT)
    facts["size"] = facts["rank"] = sizes[: len(sets)]
    folder = tmp_path_factory.mktemp("choose")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ms_data.deduplication.sorting, "MEMORY_BYTES", 64)
        chosen = list(choose(folder, labels, facts, DedupOptions(keep=keep)))
    best = {"first": lambda n: n, "longest": lambda n: -sizes[n], "priority": lambda n: sizes[n]}
    clusters = [
        [n for n, member in enumerate(labels) if member == label] for label in sorted(set(labels))
    ]
    expected = [
        Cluster(min(members, key=lambda n: (best[keep](n), n)), members)
        for members in clusters
        if len(members) > 1
    ]
    assert [
        msgspec.json.decode(b"".join(cluster.lines()), type=Cluster) for cluster in chosen
    ] == expected


def test_a_run_starts_where_any_field_changes() -> None:
    records = np.array([(1, 0, 5), (1, 0, 6), (1, 1, 7), (2, 1, 8), (2, 1, 9)], RECORD)
    assert runs(records, "key", "check").tolist() == [0, 0, 2, 3, 3]


def cut_repeats_slowly(texts: list[str], window_size: int) -> list[str]:
    """Cut every window of words that occurred before, word by word; words are single letters."""
    seen: dict[tuple[str, ...], tuple[int, int]] = {}
    remaining = []
    for number, text in enumerate(texts):
        tokens = text.split()
        removed = set()
        for start in range(len(tokens) - window_size + 1):
            window = tuple(tokens[start : start + window_size])
            document, first = seen.setdefault(window, (number, start))
            if (document, first) != (number, start):
                cut_from = max(start, first + window_size) if document == number else start
                removed |= set(range(cut_from, start + window_size))
        remaining.append(
            " ".join(word for start, word in enumerate(tokens) if start not in removed)
        )
    return [text for text in remaining if text]


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(
        st.lists(st.sampled_from("abc"), min_size=1, max_size=25).map(" ".join),
        min_size=1,
        max_size=5,
    ),
    words=st.integers(1, 5),
)
def test_repeated_word_windows_are_cut_like_the_brute_force_reference(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], words: int
) -> None:
    """Where windows overlap, the first one is kept."""
    folder = tmp_path_factory.mktemp("cut")
    options = DedupOptions(exact=False, minhash=False, substring_words=words)
    dedup(write_lines(folder / "a.jsonl", texts), out=folder / "out", options=options, workers=1)
    assert [" ".join(text.split()) for text in kept_texts(folder / "out")] == cut_repeats_slowly(
        texts, words
    )


def test_windows_of_dropped_documents_do_not_count_as_seen(tmp_path: Path) -> None:
    texts = ["a b c d e f", "a b c d e f", "x a b c d e f y"]
    options = DedupOptions(minhash=False, substring_words=4, keep="first")
    path = write_lines(tmp_path / "a.jsonl", texts)
    summary = dedup(path, out=tmp_path / "out", options=options, workers=1)
    assert summary.dropped == {"exact": 1}
    assert kept_texts(tmp_path / "out") == ["a b c d e f", "x y"]


def test_window_hashes_are_equal_exactly_for_equal_words() -> None:
    """The position in the text does not matter."""
    rng = random.Random(3)
    words = [f"w{rng.randrange(9)}" for _ in range(200)]
    keys = WindowHasher(6).keys(" ".join(words)).tolist()
    windows = [tuple(words[start : start + 6]) for start in range(195)]
    assert len(keys) == len(windows)
    assert len({*zip(keys, windows, strict=True)}) == len(set(windows)) == len(set(keys))


def test_cutting_a_span_removes_the_punctuation_after_it() -> None:
    """Punctuation and spaces of the remaining words stay."""
    assert cut_words("One, two; three. Four!", [(1, 3)]) == "One, Four!"
    assert cut_words("你好世界。", [(0, 2)]) == "世界。"


def test_output_does_not_depend_on_worker_count_or_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ms_data.engine.batches, "BATCH_CHARACTERS", 1000)
    path, options = write_corpus(tmp_path), DedupOptions(substring_words=6)
    dedup(path, out=tmp_path / "one", options=options, workers=1)
    monkeypatch.setattr(ms_data.deduplication.sorting, "MEMORY_BYTES", 64)
    dedup(path, out=tmp_path / "two", options=options, workers=2)
    assert read_tree(tmp_path / "one") == read_tree(tmp_path / "two")


def test_a_run_killed_at_any_write_sync_or_rename_resumes_to_identical_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ms_data.engine.batches, "BATCH_CHARACTERS", 8000)
    path, options = write_corpus(tmp_path), DedupOptions(substring_words=6)
    dedup(path, out=tmp_path / "reference", options=options, workers=1)
    expected = read_tree(tmp_path / "reference")
    for event in range(1, 200, 5):
        out = tmp_path / f"out{event}"

        def run(out: Path = out) -> None:
            dedup(path, out=out, options=options, workers=1)

        status = run_and_die_at(event, run)
        assert status in (0, signal.SIGKILL)
        run()
        assert read_tree(out) == expected
        if not status:
            break
    assert event > 30


def test_the_command_deduplicates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints a summary and refuses bad settings in one line."""
    path, out = str(write_corpus(tmp_path)), str(tmp_path / "out")
    assert main(["dedup", path, "--out", out, "--workers", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] == 5
    assert main(["dedup", path, "--out", out, "--workers", "1", "--keep", "longest"]) == 2
    assert "keep is 'longest', was 'first'" in capsys.readouterr().err
    assert main(["dedup", path, "--out", f"{out}2", "--bands", "0"]) == 2
    assert "bands" in capsys.readouterr().err


def test_disabling_every_criterion_is_refused(tmp_path: Path) -> None:
    options = DedupOptions(exact=False, minhash=False)
    with pytest.raises(SettingError, match="no criterion is enabled"):
        dedup(write_corpus(tmp_path), out=tmp_path / "out", options=options)


@pytest.mark.slow
def test_memory_does_not_grow_with_repeated_windows(tmp_path: Path) -> None:
    """A million equal words in each of 4 or 40 documents; compares peak memory of all processes."""
    script = (
        "import re, resource, sys; from ms_data import DedupOptions, dedup\n"
        "options = DedupOptions(substring_words=50)\n"
        "dedup(sys.argv[1], out=sys.argv[2], options=options, workers=1)\n"
        # ru_maxrss is inherited from the parent process.
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1],\n"
        "      resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    peaks = []
    for count in (4, 40):
        rng = random.Random(count)
        texts = [" ".join(f"w{rng.randrange(10**7)}" for _ in range(900)) for _ in range(count)]
        path = write_lines(
            tmp_path / f"{count}.jsonl", [f"{prefix} {'0 ' * 10**6}" for prefix in texts]
        )
        command = [sys.executable, "-c", script, path, tmp_path / f"out{count}"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append([int(kib) >> 10 for kib in result.stdout.split()])
        assert [len(text.split()) for text in kept_texts(tmp_path / f"out{count}")] == [
            900 + 50 * (not n) for n in range(count)
        ]
    assert all(large < small + 200 for small, large in zip(*peaks, strict=True)), peaks
