"""Tables and archives that are damaged, hostile or huge, and reading that is interrupted."""

import json
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from ms_data import CorpusError, build, train_tokenizer
from ms_data.corpus import arrow_messages, parquet_pages
from ms_data.corpus.find import find_corpus
from ms_data.corpus.parquet_pages import read_header

from .test_build import SAVE_OFTEN, kill_after_saves, random_texts, read_files, write_lines
from .test_tables import (
    CORPUS_WRITERS,
    TEXTS,
    CorpusWriter,
    read_corpus,
    to_table,
    write_parquet,
    write_tar,
    write_wet,
)


def test_a_build_killed_inside_a_row_group_resumes_to_identical_bytes(tmp_path: Path) -> None:
    rng = random.Random(3)
    texts = ["".join(rng.choices("abcdefghij   ", k=rng.randint(1, 9000))) for _ in range(250)]
    pq.write_table(to_table(texts), tmp_path / "a.parquet", row_group_size=250)
    tokenizer = tmp_path / "tokenizer.json"
    train_tokenizer(
        write_lines(tmp_path / "b.jsonl", random_texts(1, 20)), vocab_size=300, out=tokenizer
    )
    out, journal = tmp_path / "out", tmp_path / "out.partial" / "journal.msgpack"
    command = [sys.executable, "-c", SAVE_OFTEN, tmp_path / "a.parquet", tokenizer, out]
    kills = 0
    while kills < 2 and kill_after_saves(rng.randint(2, 5), journal, command, rng):
        kills += 1
        assert journal.exists()
    assert kills
    subprocess.run(command, check=True, timeout=120)
    write_lines(tmp_path / "c.jsonl", texts)
    build(
        tmp_path / "c.jsonl",
        tokenizer=tokenizer,
        out=tmp_path / "reference",
        held_out_fraction=0.2,
        shard_size_mib=1,
    )
    actual, expected = read_files(out), read_files(tmp_path / "reference")
    del actual["build.json"], expected["build.json"]
    assert actual == expected


def test_resuming_does_not_decode_finished_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(
        to_table([str(n) for n in range(1000)]), tmp_path / "a.parquet", row_group_size=250
    )
    documents = list(find_corpus(tmp_path / "a.parquet").documents())
    decoded: list[list[int]] = []
    decode = pq.ParquetFile.iter_batches

    def recording_iter_batches(
        self: object, *sizes: int, row_groups: list[int], **options: object
    ) -> object:
        decoded.append(row_groups)
        return decode(self, *sizes, row_groups=row_groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", recording_iter_batches)
    source = find_corpus(tmp_path / "a.parquet")
    remaining = [document.text for document in source.documents(documents[600].after)]
    assert remaining == [str(n) for n in range(601, 1000)]
    assert decoded == [[2], [2], [3], [3]]  # each is inspected first and then decoded


FOOTERS = """
import sys
from pathlib import Path
from ms_data import CorpusError
from ms_data.corpus.find import find_corpus

path = Path(sys.argv[1])
content = path.read_bytes()
start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
for at in range(start, len(content) - 8):
    if content[at] != 2:
        continue
    path.write_bytes(content[:at] + b"\\0" + content[at + 1 :])
    try:
        print(sum(1 for _ in find_corpus(path).documents()))
    except CorpusError as error:
        print(error)
"""


def test_a_contradictory_parquet_footer_does_not_crash_the_process(tmp_path: Path) -> None:
    """The footer marks a column as required and also counts its nulls.

    pyarrow aborts on it when asked for the column, and raises when asked for rows.
    """
    pq.write_table(to_table(["a", "b", "c"]), tmp_path / "a.parquet")
    result = subprocess.run(
        [sys.executable, "-c", FOOTERS, tmp_path / "a.parquet"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "histogram size mismatch" in result.stdout


READ = """
import re, sys
import pyarrow.ipc, pyarrow.parquet
from ms_data.corpus import arrow_messages, parquet_pages
from ms_data.corpus.find import find_corpus
from ms_data.corpus.parquet_pages import read_header
# ru_maxrss is inherited from the parent process.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
before = peak()
try:
    print(sum(len(document.text) for document in find_corpus(sys.argv[1]).documents()), end=" ")
except ValueError as error:
    print(str(error).replace(" ", "_"), end=" ")
print(peak() - before)
"""


def read_in_subprocess(path: Path) -> tuple[str, int]:
    """Read a file in a separate process; return the outcome and peak memory growth in MiB."""
    command = [sys.executable, "-c", READ, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    outcome, growth = result.stdout.split()
    return outcome, int(growth) >> 10


def write_large(path: Path, groups: int, group_mib: int) -> int:
    """Write random text in rows of 4 KiB and large row groups; return the number of characters."""
    rng = random.Random(0)
    size = 0
    schema = pa.schema({"text": pa.string()})
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for _ in range(groups):
            block = rng.randbytes(1 << 20).hex()
            rows = [block[offset : offset + 4096] for offset in range(0, len(block), 4096)]
            texts = rows * (group_mib // 2)
            size += sum(map(len, texts))
            writer.write_table(pa.table({"text": texts}), row_group_size=len(texts))
    return size


@pytest.mark.parametrize(
    ("groups", "group_mib"), [(2, 64), pytest.param(8, 256, marks=pytest.mark.slow)]
)
def test_a_large_table_is_read_in_constant_memory(
    tmp_path: Path, groups: int, group_mib: int
) -> None:
    """Peak memory grows by a few batches for 128 MiB or 2 GiB."""
    size = write_large(tmp_path / "a.parquet", groups, group_mib)
    assert (tmp_path / "a.parquet").stat().st_size >= groups * group_mib << 20
    outcome, growth_mib = read_in_subprocess(tmp_path / "a.parquet")
    assert outcome == str(size)
    assert growth_mib < 96  # 73 and 72


def header(name: str, member_type: bytes = tarfile.REGTYPE, size: int = 0, link: str = "") -> bytes:
    """Return a tar member header."""
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = member_type, size, link
    return info.tobuf(tarfile.GNU_FORMAT)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "up": (header("../x.txt"), r"\.\./x\.txt: a path outside the archive"),
    "inner": (header("a/../../x.txt"), "a path outside the archive"),
    "absolute": (header("/etc/x.txt"), "/etc/x.txt: a path outside the archive"),
    "symlink": (header("x.txt", tarfile.SYMTYPE, link="/etc/passwd"), "a link or a device"),
    "hard link": (header("x.txt", tarfile.LNKTYPE, link="a.txt"), "a link or a device"),
    "device": (header("x.txt", tarfile.CHRTYPE), "a link or a device"),
    "size": (header("x.txt", size=1 << 20), "the archive ends inside a member"),
    "skipped": (header("x.jpg", size=1 << 40), "the archive ends inside a member"),
    "long name": (header("x", tarfile.GNUTYPE_LONGNAME, 1 << 33), "a header of 8589934592"),
    "records": (
        header("x", tarfile.XHDTYPE, 5) + b"99 x=".ljust(512, b"\0"),
        "invalid record length",
    ),
    "garbage": (b"x" * 512, "invalid header: "),
    "no end": (
        header("x.txt", size=1) + b"x".ljust(512, b"\0"),
        "the end-of-archive block is missing",
    ),
    "twice": (2 * (header("x.txt", size=1) + b"x".ljust(512, b"\0")), "two members x.txt"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives_are_refused(tmp_path: Path, case: str) -> None:
    """Links, devices, paths outside the archive and false sizes."""
    content, match = HOSTILE[case]
    ending = b"" if case == "no end" else bytes(1024)
    (tmp_path / "a.tar").write_bytes(content + ending)
    with pytest.raises(CorpusError, match=rf"a\.tar: damaged tar archive \(.*{match}"):
        read_corpus(tmp_path / "a.tar")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def test_unusable_archive_samples_are_skipped_and_named(tmp_path: Path) -> None:
    """No text, invalid UTF-8, too long or not a row; concatenated archives are read fully."""
    members = [
        ("a.txt", b"one"),
        ("b.jpg", b"\xff"),
        ("c.txt", b"\xff"),
        ("d.txt", b"x" * ((1 << 20) + 1)),
        ("e.json", b'{"body": 1}'),
        ("f.json", json.dumps({"text": "from a row"}).encode()),
        ("g.txt", b"the text"),
        ("g.json", b'{"text": "what it is about"}'),
    ]
    write_tar(tmp_path / "a.tar", members)
    (tmp_path / "a.tar").write_bytes(2 * (tmp_path / "a.tar").read_bytes())
    texts, reasons = read_corpus(tmp_path / "a.tar", document_limit_mib=1)
    assert texts == ["one", "from a row", "the text"] * 2
    for reason, match in zip(
        reasons,
        ["b: no .txt or .json member", "c.txt: not UTF-8", "d.txt: longer", "e.json: "],
        strict=False,
    ):
        assert f"a.tar: {match}" in reason


@pytest.mark.parametrize(
    "write_corpus", CORPUS_WRITERS, ids=lambda write_corpus: write_corpus.__name__
)
def test_random_damage_raises_corpus_error_or_changes_only_text(
    write_corpus: CorpusWriter, tmp_path: Path
) -> None:
    """In every file format."""
    corpus = write_corpus(tmp_path)
    files = sorted(path for path in corpus.rglob("*") if path.is_file()) or [corpus]
    rng = random.Random(1)
    for _ in range(40):
        path = rng.choice(files)
        content = path.read_bytes()
        changed = bytearray(content)
        if rng.random() < 0.2:
            del changed[rng.randrange(len(content)) :]
        else:
            changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        error = ""
        try:
            assert len(read_corpus(corpus)[0]) <= len(TEXTS)
        except CorpusError as raised:
            error = str(raised)
        assert not error or ("\n" not in error and str(corpus.parent) in error)
        path.write_bytes(content)


def test_truncated_archives_and_tables_are_detected(tmp_path: Path) -> None:
    """Except a web archive truncated between records, since the format has no end marker."""
    for write_corpus in CORPUS_WRITERS:
        folder = tmp_path / write_corpus.__name__
        folder.mkdir()
        corpus = write_corpus(folder)
        if corpus.is_dir() or ".csv" in corpus.name or ".tsv" in corpus.name:
            continue
        content = corpus.read_bytes()
        texts, _ = read_corpus(corpus)
        for share in (0.2, 0.5, 0.9):
            cut = int(len(content) * share)
            if content.startswith(b"\x1f\x8b\x08", cut):  # between records: see the next test
                cut -= 1
            corpus.write_bytes(content[:cut])
            with pytest.raises(CorpusError):
                assert read_corpus(corpus)[0] == texts


def test_a_web_archive_truncated_between_records_reads_up_to_there(tmp_path: Path) -> None:
    """The format has no end marker."""
    path = write_wet(tmp_path)
    content = path.read_bytes()
    texts, _ = read_corpus(path)
    path.write_bytes(content[: content.index(b"\x1f\x8b\x08", len(content) // 2)])
    remaining, _ = read_corpus(path)
    assert 0 < len(remaining) < len(texts)
    assert remaining == texts[: len(remaining)]


def test_a_value_shared_by_many_rows_takes_little_memory(tmp_path: Path) -> None:
    """4 GB of text in a few kilobytes; few rows are decoded at a time."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), ["y" * (4 << 20)])
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    outcome, growth_mib = read_in_subprocess(tmp_path / "a.parquet")
    assert outcome == str(4000 << 20)
    assert growth_mib < 400


def test_oversized_pages_and_batches_are_refused_before_decompressing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Based on the sizes they declare."""
    monkeypatch.setattr(parquet_pages, "PAGE_LIMIT_MIB", 1)
    monkeypatch.setattr(arrow_messages, "BATCH_LIMIT_MIB", 1)
    texts = pa.table({"text": ["x" * (3 << 20)]})
    for compression in ("zstd", "none"):
        pq.write_table(texts, tmp_path / "a.parquet", compression=compression, use_dictionary=False)
        with pytest.raises(CorpusError, match=r"3 MiB.*more than 1: write the table"):
            read_corpus(tmp_path / "a.parquet")
        pa.feather.write_feather(
            texts, tmp_path / "b.arrow", compression=compression.replace("none", "uncompressed")
        )
        with pytest.raises(CorpusError, match=r"a record batch of 3 MiB, more than 1: write"):
            read_corpus(tmp_path / "b.arrow")


@pytest.mark.parametrize("field_and_value", [(2, 1 << 30), (3, 1 << 30), (2, -5), (3, -5)])
def test_a_page_with_a_false_size_is_refused(
    tmp_path: Path, field_and_value: tuple[int, int]
) -> None:
    """Larger than its column, compressed or uncompressed, or negative."""
    path = write_parquet(tmp_path)
    content = path.read_bytes()
    column = pq.ParquetFile(path).metadata.row_group(0).column(1)
    offset = column.dictionary_page_offset
    header = read_header(content[offset:])
    fields = [0, header.uncompressed_bytes, header.compressed_bytes]
    fields[field_and_value[0] - 1] = field_and_value[1]
    numbers = b"".join(b"\x15" + zigzag(number) for number in (2, *fields[1:]))
    changed = content[:offset] + numbers + content[offset + len(numbers) :]
    path.write_bytes(changed)
    with pytest.raises(CorpusError, match=r"a\.parquet: damaged Parquet table \(the page at"):
        read_corpus(path)


def zigzag(value: int) -> bytes:
    """Encode a signed number as in Thrift's compact protocol."""
    remaining = (value << 1) ^ (value >> 63)
    parts = []
    while remaining > 127:
        parts.append(remaining & 127 | 128)
        remaining >>= 7
    return bytes([*parts, remaining])
