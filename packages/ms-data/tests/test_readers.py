"""Documents are read from files in a fixed order, starting at any position."""

import gzip
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_data import CorpusError
from ms_data.corpus.corpus import Corpus, Position
from ms_data.corpus.find import find_corpus
from ms_data.corpus.reader import FileReader, OpenFile, ReadOptions, ReadResult
from ms_data.corpus.readers import READERS

from .test_build import random_texts, write_lines


def read_texts(source: Corpus, start: Position | None = None) -> list[str]:
    """Return the texts of all documents from a position on."""
    return [document.text for document in source.documents(start or Position())]


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=30),
    suffix=st.sampled_from(["", ".gz", ".zst"]),
)
def test_json_lines_give_back_any_text(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], suffix: str
) -> None:
    """Any Unicode survives, and other columns are ignored."""
    path = tmp_path_factory.mktemp("lines") / f"a.jsonl{suffix}"
    assert read_texts(find_corpus(write_lines(path, lines))) == lines


def test_reading_resumes_at_the_position_after_any_document(tmp_path: Path) -> None:
    for number, name in enumerate(["a.txt", "b.jsonl", "c.jsonl.gz", "d.jsonl.zst", "e.txt"]):
        if name.endswith(".txt"):
            (tmp_path / name).write_text(f"text {number}")
        else:
            write_lines(tmp_path / name, random_texts(number, 9))
    source = find_corpus(tmp_path)
    documents = list(source.documents())
    assert len(documents) == 29
    for number, document in enumerate(documents):
        remaining = [later.text for later in documents[number + 1 :]]
        assert read_texts(source, document.after) == remaining
    assert documents[-1].read_bytes == source.size_bytes


def test_blank_lines_empty_texts_and_byte_order_marks_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"text": ""}\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbftwo")
    (tmp_path / "c.txt").write_bytes(b"")
    assert read_texts(find_corpus(tmp_path)) == ["one", "two"]


def test_lines_longer_than_a_block_are_one_document(tmp_path: Path) -> None:
    lines = ["small", "long " * 600_000, "small again"]
    for suffix in ("", ".gz", ".zst"):
        path = write_lines(tmp_path / f"a.jsonl{suffix}", lines)
        assert read_texts(find_corpus(path)) == lines


def test_compressed_text_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one"))
    (tmp_path / "b.py.zst").write_bytes(zstandard.ZstdCompressor().compress(b"two"))
    assert read_texts(find_corpus(tmp_path)) == ["one", "two"]


def test_the_text_column_can_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": 3, "content": "one"}) + "\n")
    assert read_texts(find_corpus(tmp_path, text_column="content")) == ["one"]


BAD = {
    "a.txt": (b"good \xff bad", "a.txt: not UTF-8: byte 0xff at offset 5"),
    "b.jsonl": (b'{"text": "x"}\n{"text": \n', "b.jsonl:2: malformed JSON"),
    "c.jsonl": (b'{"text": "x"}\n\n{"body": "y"}\n', "c.jsonl:3: .*`text`.*--text-column"),
    "d.jsonl": (b'{"text": 3}\n', "d.jsonl:1: Expected `str`"),
    "e.jsonl": (b'{"text": "\xff"}\n', "e.jsonl:1: not UTF-8: byte 0xff at offset 10"),
    "f.jsonl": (b"[1]\n", "f.jsonl: item 1: Expected `object`"),
    "h.jsonl": (
        b'{"text": "x"}\n{"text": "y", "m": ' + b"[" * 10**5 + b"]" * 10**5 + b"}\n",
        "h.jsonl:2: its JSON is nested too deeply",
    ),
    "g.jsonl": (b'{"text": "\\ud800"}\n', "g.jsonl:1: malformed JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_unreadable_documents_are_refused_or_skipped(tmp_path: Path, name: str) -> None:
    """The error names file and line, or file and byte; skip_invalid skips only that document."""
    content, match = BAD[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "z.txt").write_text("last")
    with pytest.raises(CorpusError, match=match):
        read_texts(find_corpus(tmp_path))
    reasons: list[str] = []
    source = find_corpus(tmp_path, skip_invalid=True)
    texts_read = [document.text for document in source.documents(on_skip=reasons.append)]
    assert texts_read == (["x"] if content.startswith(b'{"text": "x"}') else []) + ["last"]
    assert len(reasons) == 1


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_compressed_files_are_errors_even_with_skip_invalid(
    tmp_path: Path, suffix: str
) -> None:
    """Truncation, a flipped bit, and a file that is not compressed."""
    path = write_lines(tmp_path / f"a.jsonl{suffix}", random_texts(1, 400))
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 0x40
    for damaged in (content[:-9], content[: len(content) // 2], bytes(flipped), b"no such thing"):
        path.write_bytes(damaged)
        with pytest.raises(CorpusError, match=r"a\.jsonl"):
            read_texts(find_corpus(path, skip_invalid=True))


def test_missing_and_empty_corpora_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no file or folder"):
        find_corpus(tmp_path / "nowhere")
    (tmp_path / ".hidden").write_text("text")
    with pytest.raises(CorpusError, match="is empty"):
        find_corpus(tmp_path)


def test_symlinks_are_followed_and_broken_ones_named(tmp_path: Path) -> None:
    """Each folder is read once, under its real name if it is inside the corpus."""
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "b.txt").write_text("two")
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    (folder / "more").symlink_to(tmp_path / "else")
    (folder / "more" / "back").symlink_to(folder)
    (folder / "z.txt").symlink_to(folder / "a.txt")
    (folder / "own").mkdir()
    (folder / "own" / "c.txt").write_text("three")
    (folder / "link").symlink_to(folder / "own")
    assert read_texts(find_corpus(folder)) == ["one", "two", "three", "one"]
    assert folder / "own" / "c.txt" in find_corpus(folder).files
    (folder / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CorpusError, match=r"gone\.txt: broken link; fix or remove it"):
        find_corpus(folder)


def test_python_sources_are_decoded_by_their_cookie() -> None:
    """Encodings declared in a source file are honored."""
    source = find_corpus("stdlib")
    assert source.reader is READERS["python_source"]
    assert source.options.skip_invalid
    latin = [path for path in source.files if b"coding: latin-1" in path.read_bytes()[:200]]
    for path in latin:
        (document,) = Corpus(name="one", files=(path,), reader=source.reader).documents()
        assert document.text == path.read_bytes().decode("latin-1")


def read_rows(file: OpenFile, options: ReadOptions, start: int) -> Iterator[ReadResult]:
    """Read the rows of a SQLite table from an open file."""
    file.raw.seek(0)
    database = sqlite3.connect(":memory:")
    database.deserialize(file.raw.read())
    rows = database.execute(f"select {options.text_column} from rows limit -1 offset {start}")
    for (text,) in rows:
        yield text


def test_a_reader_claims_files_by_their_first_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that would be skipped as binary are read, and reading resumes at any row."""
    with sqlite3.connect(tmp_path / "b.db") as database:
        database.execute("create table rows (text)")
        database.executemany("insert into rows values (?)", [("one",), ("",), ("two",)])
    (tmp_path / "a.txt").write_text("zero")
    assert read_texts(find_corpus(tmp_path)) == ["zero"]
    signatures = (b"SQLite format 3\x00",)
    monkeypatch.setitem(READERS, "sqlite", FileReader(documents=read_rows, signatures=signatures))
    source = find_corpus(tmp_path)
    assert read_texts(source) == ["zero", "one", "two"]
    (_, first, _) = source.documents()
    assert read_texts(source, first.after) == ["two"]
