"""Binary files are recognized by their first bytes and are never used for training."""

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
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("a.py")
        member.size = len(TEXT)
        archive.addfile(member, io.BytesIO(TEXT.encode()))
    return buffer.getvalue()


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", TEXT)
    return buffer.getvalue()


def _sqlite(tmp_path: Path) -> bytes:
    with sqlite3.connect(tmp_path / "new.sqlite") as database:
        database.execute("create table texts (text)")
    database.close()
    return (tmp_path / "new.sqlite").read_bytes()


def _array() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(9))
    return buffer.getvalue()


def binary_files(tmp_path: Path) -> dict[str, tuple[bytes, str]]:
    """Map a file name to its content and file type; real tools write the content where possible."""
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
        "x.wav": (b"RIFF\x24\0\0\0WAVEfmt ", "WAV audio"),
        "python": (Path(sys.executable).resolve().read_bytes()[:4096], "ELF program"),
        "late": (TEXT.encode() * 100 + b"\0", "file with NUL bytes"),
        "x.msd": (b"ms-data shard 1\nabc", "shard of ms-data"),
    }


def _read(source: Corpus) -> tuple[list[str], Counter[str]]:
    counts: Counter[str] = Counter()

    def count(file_type: str) -> None:
        counts[file_type] += 1

    return [document.text for document in source.documents(on_leave_out=count)], counts


def test_a_binary_file_passed_by_name_is_refused(tmp_path: Path) -> None:
    """The line names the file, its type and a remedy, for any suffix."""
    for name, (content, file_type) in binary_files(tmp_path).items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(CorpusError, match=rf"{name}: {file_type}, not text; \w+"):
            _read(find_corpus(path))


def test_binary_files_in_a_folder_are_skipped_and_counted(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT)
    files = binary_files(tmp_path)
    for name, (content, _) in files.items():
        (folder / name).write_bytes(content)
    texts, counts = _read(find_corpus(folder))
    assert texts == [TEXT]
    assert counts == Counter(file_type for _, file_type in files.values())
    reported: list[str] = []
    train_tokenizer(folder, vocab_size=260, on_leave_out=reported.append)
    assert Counter(reported) == counts


def test_text_that_starts_like_a_binary_signature_is_read(tmp_path: Path) -> None:
    for number, text in enumerate(
        ["PAR1 is a mark.", "Obj", "MMXXVI", "GGUF is a format.", "BZh and so on", "wOFF!", "RIFF"]
    ):
        (tmp_path / f"{number}.txt").write_text(text)
        assert _read(find_corpus(tmp_path / f"{number}.txt")) == ([text], Counter())


def test_compressed_files_are_recognized_without_their_suffix(tmp_path: Path) -> None:
    row = json.dumps({"text": "one"}).encode()
    for name, content, texts in (
        ("plain", gzip.compress(b"text"), ["text"]),
        ("a.jsonl", zstandard.ZstdCompressor().compress(row), ["one"]),
        ("b.jsonl.gz", gzip.compress(row + b"\n" + row), ["one", "one"]),
    ):
        (tmp_path / name).write_bytes(content)
        assert _read(find_corpus(tmp_path / name))[0] == texts


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_utf16_and_utf32_text_is_refused_by_its_encoding(tmp_path: Path, encoding: str) -> None:
    """It stops the build, or is skipped as invalid."""
    (tmp_path / "a.txt").write_text("text", encoding=encoding)
    (tmp_path / "b.txt").write_text("other")
    with pytest.raises(CorpusError, match=rf"a\.txt: text in {encoding.upper()}; convert it"):
        _read(find_corpus(tmp_path))
    assert _read(find_corpus(tmp_path, skip_invalid=True))[0] == ["other"]


ROWS = [{"text": 'one "[{,}]" \\'}, {"text": "two"}, {"text": "3\n", "more": [[1], {"a": []}]}]
TEXTS = [str(row["text"]) for row in ROWS]


@pytest.mark.parametrize("name", ["a.json", "A.JSON", "a.jsonl", "a.json.gz", "A.JSON.ZST", "rows"])
@pytest.mark.parametrize(
    "content",
    [
        json.dumps(ROWS),
        "\ufeff" + json.dumps(ROWS, indent=1) + "\n",
        "[" + " ,\n".join(map(json.dumps, ROWS)) + "]",
        "\n".join(map(json.dumps, ROWS)),
    ],
    ids=["array", "indented", "item per line", "lines"],
)
def test_json_rows_are_recognized_whatever_the_file_name(
    content: str, name: str, tmp_path: Path
) -> None:
    """An array of rows or a row per line; in a folder or by name; also with a row parser."""
    data = content.encode()
    if name.lower().endswith("gz"):
        data = gzip.compress(data)
    if name.lower().endswith("zst"):
        data = zstandard.ZstdCompressor().compress(data)
    (tmp_path / name).write_bytes(data)
    for corpus in (tmp_path, tmp_path / name):
        assert _read(find_corpus(corpus))[0] == TEXTS
        parsed = find_corpus(corpus, parse=lambda row: str(row["text"]).upper())
        assert _read(parsed)[0] == [text.upper() for text in TEXTS]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
def test_array_items_do_not_depend_on_block_boundaries(block: int) -> None:
    """An item beyond the limit is None, and reading continues after it."""
    text = json.dumps([*ROWS, {"text": "x" * 200}, 5, "]", {"text": "\\\\"}], indent=1).encode()
    blocks = (text[start : start + block] for start in range(0, len(text), block))
    items = [item and json.loads(item) for item in array_items(blocks, 100)]
    assert items == [*ROWS, None, 5, "]", {"text": "\\\\"}]


@pytest.mark.parametrize(
    ("content", "problem"),
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
def test_unreadable_rows_are_refused_with_their_location(
    content: str, problem: str, tmp_path: Path
) -> None:
    """A file of rows is never one document, and a truncated array never a short one."""
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(CorpusError, match=problem):
        _read(find_corpus(tmp_path / "a.json"))


def test_json_without_rows_of_text_is_one_document(tmp_path: Path) -> None:
    """Settings, lists and logs in a folder, and an object in a file passed by name."""
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


def test_a_json_array_is_read_in_constant_memory(tmp_path: Path) -> None:
    """100 rows of 1 MiB within 24 MiB."""
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
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    count, growth_kib = map(int, result.stdout.split())
    assert count == 100
    assert growth_kib < 24 << 10


def test_documents_beyond_the_limit_are_refused_with_their_file(tmp_path: Path) -> None:
    """Plain, compressed, or a line; other lines are still read."""
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
    result = _read(find_corpus(tmp_path / "c.jsonl.zst", document_limit_mib=1, skip_invalid=True))
    assert result[0] == ["one", "two"]
    with pytest.raises(SettingError, match="document_limit_mib"):
        find_corpus(tmp_path, document_limit_mib=0)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_decompression_bombs_are_read_in_constant_memory(tmp_path: Path, suffix: str) -> None:
    """300 MB of spaces in a few kilobytes."""
    block = b" " * (1 << 20)
    path = tmp_path / f"a.jsonl.{suffix}"
    if suffix == "gz":
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(300):
                file.write(block)
    else:
        with path.open("wb") as raw, zstandard.ZstdCompressor().stream_writer(raw) as file:
            for _ in range(300):
                file.write(block)
    script = (
        "import re, sys; from ms_data.corpus.find import find_corpus\n"
        # ru_maxrss is inherited from the parent process.
        "status = lambda: open('/proc/self/status').read()\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+) kB', status())[1])\n"
        "before = peak()\n"
        "source = find_corpus(sys.argv[1], document_limit_mib=1)\n"
        "try: print(len(list(source.documents())))\n"
        "except ValueError as error: print('longer than' in str(error), end=' ')\n"
        "print(peak() - before)\n"
    )
    command = [sys.executable, "-c", script, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    outcome, growth_kib = result.stdout.split()
    assert outcome == "True"
    assert int(growth_kib) < 64 << 10


@pytest.mark.parametrize("name", ["A.JSONL", "a.Jsonl", "a.NDJSON", "a.jsonlines", "A.JSONL.GZ"])
def test_suffixes_are_case_insensitive(name: str, tmp_path: Path) -> None:
    content = b'{"text": "one"}\r\n{"text": "two"}\r\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("GZ") else content)
    assert [document.text for document in find_corpus(tmp_path).documents()] == ["one", "two"]
