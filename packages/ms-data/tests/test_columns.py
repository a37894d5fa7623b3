"""What is not the text of a row goes through `clean` and `dedup` with it."""

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


def lines_in(folder: Path) -> list[dict[str, Any]]:
    """The documents that a pass wrote."""
    found = []
    for path in sorted((folder / "documents").iterdir()):
        content = zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read()
        found += [json.loads(line) for line in content.decode().split("\n") if line]
    return found


def as_jsonl(path: Path) -> Path:
    """JSON Lines."""
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def as_parquet(path: Path) -> Path:
    """Parquet, with a column of dates and one without a value."""
    rows = [{**row, "day": datetime.date(2026, 1, 2), "none": None} for row in ROWS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def as_csv(path: Path) -> Path:
    """Text alone."""
    path = path.with_suffix(".csv")
    lines = [f'"{row["content"]}",en,{row["url"]},{row["id"]}' for row in ROWS]
    path.write_text("\n".join(["content,lang,url,id", *lines]) + "\n")
    return path


@pytest.mark.parametrize("write", [as_jsonl, as_parquet, as_csv])
def test_all_columns_of_a_row_are_kept(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """Through both passes, with the row's own id beside the place of the document."""
    corpus = write(tmp_path / "rows")
    rules: dict[str, Any] = {"control_characters": {}}
    clean(corpus, rules, out=tmp_path / "cleaned", text_column="content", workers=1)
    exact = DedupOptions(minhash=False)
    dedup(tmp_path / "cleaned", out=tmp_path / "unique", options=exact, workers=1)
    for folder in ("cleaned", "unique"):
        lines = lines_in(tmp_path / folder)
        assert [line["text"] for line in lines] == [row["content"] for row in ROWS]
        for number, (line, row) in enumerate(zip(lines, ROWS, strict=True), 1):
            assert (line["url"], line["lang"], line["source_id"]) == (row["url"], "en", row["id"])
            assert line["id"].endswith(f"#{number}")
            if write is as_jsonl:
                assert line["more"] == row["more"]
            if write is as_parquet:
                assert line["day"] == "2026-01-02"


def test_files_of_text_have_no_columns(tmp_path: Path) -> None:
    """Their lines are text and id."""
    (tmp_path / "a.txt").write_text("A text of some seven or eight words.")
    clean(tmp_path / "a.txt", {"unicode": {}}, out=tmp_path / "out", workers=1)
    assert lines_in(tmp_path / "out") == [
        {"text": "A text of some seven or eight words.", "id": "a.txt#1"}
    ]


@pytest.mark.parametrize("row", ['{"url": "x"}', '{"text": null}', '{"text": 3}', '{"text": [1]}'])
def test_a_row_without_its_text_is_named(row: str, tmp_path: Path) -> None:
    """As when its text alone is read."""
    (tmp_path / "a.jsonl").write_text(row)
    with pytest.raises(CorpusError, match=r"a\.jsonl:1.*name the text column"):
        clean(tmp_path / "a.jsonl", {"unicode": {}}, out=tmp_path / "out", strict=True, workers=1)


def test_numbers_of_any_size_and_no_half_characters(tmp_path: Path) -> None:
    """A whole number of 100 digits is kept; a lone surrogate in a column is named."""
    big = 10**100
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "words", "n": big}) + "\n")
    clean(tmp_path / "a.jsonl", {"unicode": {}}, out=tmp_path / "out", workers=1)
    assert lines_in(tmp_path / "out")[0]["n"] == big
    (tmp_path / "b.jsonl").write_text('{"text": "words", "n": "\\ud800"}\n')
    with pytest.raises(CorpusError, match=r"b\.jsonl:1"):
        clean(tmp_path / "b.jsonl", {"unicode": {}}, out=tmp_path / "b", strict=True, workers=1)
