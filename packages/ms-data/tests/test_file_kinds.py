"""What is no text is never trained on: known by its first bytes, left out or refused by name."""

import bz2
import gzip
import io
import json
import lzma
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import zstandard

from ms_data import CorpusError, SettingError, train_tokenizer
from ms_data.corpus.corpus import Corpus
from ms_data.corpus.find import find_corpus
from ms_data.corpus.unpacking import array_items

TEXT = "To be, or not to be: that is the question.\n" * 20


def _tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo("a.py")
        member.size = len(TEXT)
        archive.addfile(member, io.BytesIO(TEXT.encode()))
    return file.getvalue()


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", TEXT)
    return file.getvalue()


def _sqlite(tmp_path: Path) -> bytes:
    with sqlite3.connect(tmp_path / "made.sqlite") as database:
        database.execute("create table texts (text)")
    database.close()
    return (tmp_path / "made.sqlite").read_bytes()


def _array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(9))
    return file.getvalue()


def files_that_are_no_text(tmp_path: Path) -> dict[str, tuple[bytes, str]]:
    """Content and the name of its kind, by file name; made by the real tools where they are."""
    tar = "tar archive without .txt or .json"
    return {
        "x.tar": (_tar(), tar),
        "x.tar.gz": (gzip.compress(_tar()), tar),
        "x.tar.zst": (
            zstandard.ZstdCompressor().compress(_tar()),
            "tar archive without .txt or .json",
        ),
        "tar.txt": (_tar(), tar),
        "x.zip": (_zip(), "zip archive"),
        "zip.jsonl": (_zip(), "zip archive"),
        "x.bz2": (bz2.compress(TEXT.encode()), "bzip2 file"),
        "x.xz": (lzma.compress(TEXT.encode()), "xz file"),
        "x.gz.gz": (gzip.compress(gzip.compress(TEXT.encode())), "file compressed twice"),
        "x.avro": (b"Obj\x01\x04\x14avro.codec\0", "Avro table"),
        "x.sqlite": (_sqlite(tmp_path), "SQLite database"),
        "x.npy": (_array(), "NumPy array"),
        "x.pdf": (b"%PDF-1.7\n% all of it letters\n%%EOF\n", "PDF document"),
        "x.png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "PNG image"),
        "x.jpg": (b"\xff\xd8\xff\xe0\0\x10JFIF", "JPEG image"),
        "x.wav": (b"RIFF\x24\0\0\0WAVEfmt ", "WAV sound"),
        "python": (Path(sys.executable).resolve().read_bytes()[:4096], "ELF program"),
        "late": (TEXT.encode() * 100 + b"\0", "file with NUL bytes"),
        "x.msd": (b"ms-data shard 1\nabc", "shard of ms-data"),
    }


def _read(source: Corpus) -> tuple[list[str], Counter[str]]:
    kinds: Counter[str] = Counter()

    def on_leave_out(kind: str) -> None:
        kinds[kind] += 1

    return [one.text for one in source.documents(on_leave_out=on_leave_out)], kinds


def test_a_file_that_is_no_text_is_refused_by_name_when_it_is_named(tmp_path: Path) -> None:
    """One line with the file, its kind and a remedy, whatever its name ends in."""
    for name, (content, kind) in files_that_are_no_text(tmp_path).items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(CorpusError, match=rf"{name}: {kind}, not text; \w+"):
            _read(find_corpus(path))


def test_files_of_a_folder_that_are_no_text_are_left_out_and_counted(tmp_path: Path) -> None:
    """The text beside them is read, and each kind is said with its count."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT)
    made = files_that_are_no_text(tmp_path)
    for name, (content, _) in made.items():
        (folder / name).write_bytes(content)
    texts, kinds = _read(find_corpus(folder))
    assert texts == [TEXT]
    assert kinds == Counter(kind for _, kind in made.values())
    heard: list[str] = []
    train_tokenizer(folder, vocab_size=260, on_leave_out=heard.append)
    assert Counter(heard) == kinds


def test_texts_that_begin_like_something_else_are_read(tmp_path: Path) -> None:
    """Letters alone are no signature, and an empty or short file is none."""
    for number, text in enumerate(
        ["PAR1 is a mark.", "Obj", "MMXXVI", "GGUF is a format.", "BZh and so on", "wOFF!", "RIFF"]
    ):
        (tmp_path / f"{number}.txt").write_text(text)
        assert _read(find_corpus(tmp_path / f"{number}.txt")) == ([text], Counter())


def test_what_is_packed_is_unpacked_whatever_its_name(tmp_path: Path) -> None:
    """By its first bytes; JSON Lines keep their name behind the packing's."""
    row = json.dumps({"text": "one"}).encode()
    for name, content, found in (
        ("plain", gzip.compress(b"text"), ["text"]),
        ("a.jsonl", zstandard.ZstdCompressor().compress(row), ["one"]),
        ("b.jsonl.gz", gzip.compress(row + b"\n" + row), ["one", "one"]),
    ):
        (tmp_path / name).write_bytes(content)
        assert _read(find_corpus(tmp_path / name))[0] == found


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_text_in_another_encoding_is_named_and_not_taken_for_binary(
    tmp_path: Path, encoding: str
) -> None:
    """Its mark says what it is; it stops the build, or is left out as invalid."""
    (tmp_path / "a.txt").write_text("text", encoding=encoding)
    (tmp_path / "b.txt").write_text("other")
    with pytest.raises(CorpusError, match=rf"a\.txt: text in {encoding.upper()}; convert it"):
        _read(find_corpus(tmp_path))
    assert _read(find_corpus(tmp_path, skip_invalid=True))[0] == ["other"]


ROWS = [{"text": 'one "[{,}]" \\'}, {"text": "two"}, {"text": "3\n", "more": [[1], {"a": []}]}]
TEXTS = [str(row["text"]) for row in ROWS]


@pytest.mark.parametrize("name", ["a.json", "A.JSON", "a.jsonl", "a.json.gz", "A.JSON.ZST", "rows"])
@pytest.mark.parametrize(
    "written",
    [
        json.dumps(ROWS),
        "\ufeff" + json.dumps(ROWS, indent=1) + "\n",
        "[" + " ,\n".join(map(json.dumps, ROWS)) + "]",
        "\n".join(map(json.dumps, ROWS)),
    ],
    ids=["array", "indented", "item per line", "lines"],
)
def test_rows_of_json_are_read_whatever_their_file_is_called(
    written: str, name: str, tmp_path: Path
) -> None:
    """One array of rows, or a row per line; named, or in a folder; also as parsed rows."""
    content = written.encode()
    if name.lower().endswith("gz"):
        content = gzip.compress(content)
    if name.lower().endswith("zst"):
        content = zstandard.ZstdCompressor().compress(content)
    (tmp_path / name).write_bytes(content)
    for corpus in (tmp_path, tmp_path / name):
        assert _read(find_corpus(corpus))[0] == TEXTS
        parsed = find_corpus(corpus, parse=lambda row: str(row["text"]).upper())
        assert _read(parsed)[0] == [text.upper() for text in TEXTS]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
def test_items_of_an_array_do_not_depend_on_the_blocks(block: int) -> None:
    """Compare with a decoder of the whole; an item beyond the limit is None, others follow it."""
    text = json.dumps([*ROWS, {"text": "x" * 200}, 5, "]", {"text": "\\\\"}], indent=1).encode()
    blocks = (text[at : at + block] for at in range(0, len(text), block))
    items = [item and json.loads(item) for item in array_items(blocks, 100)]
    assert items == [*ROWS, None, 5, "]", {"text": "\\\\"}]


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ('[{"text": "one"}, {"text": "tw', "the array is not closed"),
        ('[{"text": "one"}] [{"text": "two"}]', "text follows"),
        ('[{"text": "one"}, {"text": tw}]', "item 2: malformed JSON"),
        ('[{"text": "one"}, {"name": "two"}]', "item 2: .*--text-column"),
        ('[{"text": "one"}, 7]', "item 2: "),
        ('[{"name": "one"}]', "item 1: .*--text-column"),
        ('{"name": "one"}\n{"name": "two"}', ":1: .*--text-column"),
    ],
)
def test_rows_that_cannot_be_read_are_refused_with_their_place(
    written: str, problem: str, tmp_path: Path
) -> None:
    """A file of rows is never one document, and a damaged array is never a shorter one."""
    (tmp_path / "a.json").write_text(written)
    with pytest.raises(CorpusError, match=problem):
        _read(find_corpus(tmp_path / "a.json"))


def test_json_without_rows_of_text_is_one_document(tmp_path: Path) -> None:
    """Settings, lists and logs in a folder, and an object in a file that the user named."""
    texts = {
        "list.json": '[{"name": "x"}]',
        "log.txt": "[{ warning\n",
        "package.json": '{\n "name": "x"\n}\n',
        "words.json": '["a", "b"]',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert _read(find_corpus(tmp_path))[0] == list(texts.values())
    assert _read(find_corpus(tmp_path / "package.json"))[0] == [texts["package.json"]]


def test_an_array_takes_no_more_memory_than_its_rows(tmp_path: Path) -> None:
    """100 MiB of rows of 1 MiB are read within 24 MiB."""
    row = json.dumps({"text": "x" * (1 << 20)})
    with (tmp_path / "a.json").open("w") as file:
        file.write("[" + ",".join([row] * 100) + "]")
    script = (
        "import re, sys; from ms_data.corpus.find import find_corpus\n"
        "status = lambda: open('/proc/self/status').read()\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+) kB', status())[1])\n"
        "before = peak()\n"
        "print(sum(1 for _ in find_corpus(sys.argv[1]).documents()), peak() - before)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    count, grown = map(int, done.stdout.split())
    assert count == 100
    assert grown < 24 << 10


def test_a_document_beyond_the_limit_is_refused_with_its_file(tmp_path: Path) -> None:
    """Plain, packed, or a line; the limit is a setting, and other lines are still read."""
    long = "x" * ((1 << 20) + 1)
    lines = "\n".join(json.dumps({"text": text}) for text in ("one", long, "two", long))
    (tmp_path / "a.txt").write_text(long)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(long.encode()))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
    for name in ("a.txt", "b.txt.gz", "c.jsonl.zst:2"):
        path = tmp_path / name.partition(":")[0]
        with pytest.raises(CorpusError, match=rf"{name}: longer than .*--document-limit-mib"):
            _read(find_corpus(path, document_limit_mib=1))
        assert len(_read(find_corpus(path, document_limit_mib=2))[0]) in (1, 4)
    found = _read(find_corpus(tmp_path / "c.jsonl.zst", document_limit_mib=1, skip_invalid=True))
    assert found[0] == ["one", "two"]
    with pytest.raises(SettingError, match="document_limit_mib"):
        find_corpus(tmp_path, document_limit_mib=0)


@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_a_small_file_that_unpacks_to_much_takes_little_memory(
    tmp_path: Path, packing: str
) -> None:
    """300 MB of spaces from some kilobytes; the reader's peak grows by a few blocks alone."""
    block = b" " * (1 << 20)
    path = tmp_path / f"a.jsonl.{packing}"
    if packing == "gz":
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(300):
                file.write(block)
    else:
        with path.open("wb") as raw, zstandard.ZstdCompressor().stream_writer(raw) as file:
            for _ in range(300):
                file.write(block)
    script = (
        "import re, sys; from ms_data.corpus.find import find_corpus\n"
        # ru_maxrss begins with that of the process that started this one.
        "status = lambda: open('/proc/self/status').read()\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+) kB', status())[1])\n"
        "before = peak()\n"
        "source = find_corpus(sys.argv[1], document_limit_mib=1)\n"
        "try: print(len(list(source.documents())))\n"
        "except ValueError as error: print('longer than' in str(error), end=' ')\n"
        "print(peak() - before)\n"
    )
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    outcome, grown = done.stdout.split()
    assert outcome == "True"
    assert int(grown) < 64 << 10


@pytest.mark.parametrize("name", ["A.JSONL", "a.Jsonl", "a.NDJSON", "a.jsonlines", "A.JSONL.GZ"])
def test_the_case_of_a_name_does_not_matter(name: str, tmp_path: Path) -> None:
    """Rows in a file of capital letters were one document of text."""
    content = b'{"text": "one"}\r\n{"text": "two"}\r\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("GZ") else content)
    assert [one.text for one in find_corpus(tmp_path).documents()] == ["one", "two"]
