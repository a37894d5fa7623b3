"""`clean` and `dedup` carry the other columns of each row along."""

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from ms_data import CorpusError, DedupOptions, clean, dedup

ROWS: list[dict[str, Any]] = [
    {
        "content": f"These are the words of document number {n}, which are its own.",
        "lang": "en",
        "url": f"https://example.org/{n}",
        "id": f"own-{n}",
        "more": {"a": [n, None, 7], "é": "ü"},
    }
    for n in range(20)
]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Read the documents that a run wrote."""
    rows = []
    for path in sorted((folder / "documents").iterdir()):
        content = zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read()
        rows += [json.loads(line) for line in content.decode().split("\n") if line]
    return rows


def write_jsonl(path: Path) -> Path:
    """Write the rows as JSON Lines."""
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def write_parquet(path: Path) -> Path:
    """Write the rows as Parquet, with a date column and a column of nulls."""
    rows = [{**row, "day": datetime.date(2026, 1, 2), "none": None} for row in ROWS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def write_csv(path: Path) -> Path:
    """Write the string columns as CSV."""
    path = path.with_suffix(".csv")
    lines = [f'"{row["content"]}",en,{row["url"]},{row["id"]}' for row in ROWS]
    path.write_text("\n".join(["content,lang,url,id", *lines]) + "\n")
    return path


@pytest.mark.parametrize("write", [write_jsonl, write_parquet, write_csv])
def test_all_columns_survive_clean_and_dedup(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """The row's own id moves to `source_id`."""
    corpus = write(tmp_path / "rows")
    rules: dict[str, Any] = {"control_characters": {}}
    clean(corpus, rules, out=tmp_path / "cleaned", text_column="content", workers=1)
    exact = DedupOptions(minhash=False)
    dedup(tmp_path / "cleaned", out=tmp_path / "unique", options=exact, workers=1)
    for folder in ("cleaned", "unique"):
        lines = read_rows(tmp_path / folder)
        assert [line["text"] for line in lines] == [row["content"] for row in ROWS]
        for number, (line, row) in enumerate(zip(lines, ROWS, strict=True), 1):
            assert (line["url"], line["lang"], line["source_id"]) == (row["url"], "en", row["id"])
            assert line["id"].endswith(f"#{number}")
            if write is write_jsonl:
                assert line["more"] == row["more"]
            if write is write_parquet:
                assert line["day"] == "2026-01-02"


def test_text_files_have_only_text_and_id(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A text of some seven or eight words.")
    clean(tmp_path / "a.txt", {"unicode": {}}, out=tmp_path / "out", workers=1)
    assert read_rows(tmp_path / "out") == [
        {"text": "A text of some seven or eight words.", "id": "a.txt#1"}
    ]


@pytest.mark.parametrize("row", ['{"url": "x"}', '{"text": null}', '{"text": 3}', '{"text": [1]}'])
def test_rows_without_text_are_refused_by_line(row: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(row)
    with pytest.raises(CorpusError, match=r"a\.jsonl:1.*name the text column"):
        clean(tmp_path / "a.jsonl", {"unicode": {}}, out=tmp_path / "out", strict=True, workers=1)


def test_huge_integers_are_preserved_and_lone_surrogates_refused(tmp_path: Path) -> None:
    big = 10**100
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "words", "n": big}) + "\n")
    clean(tmp_path / "a.jsonl", {"unicode": {}}, out=tmp_path / "out", workers=1)
    assert read_rows(tmp_path / "out")[0]["n"] == big
    (tmp_path / "b.jsonl").write_text('{"text": "words", "n": "\\ud800"}\n')
    with pytest.raises(CorpusError, match=r"b\.jsonl:1"):
        clean(tmp_path / "b.jsonl", {"unicode": {}}, out=tmp_path / "b", strict=True, workers=1)
