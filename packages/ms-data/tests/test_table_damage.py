"""Files of tables and archives that are damaged, hostile, huge, or whose reading is cut short."""

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

from .test_build import INTERRUPTED, files_of, killed_after, texts_of, write_lines
from .test_tables import MAKES, TEXTS, Make, found, parquet, table, tar_of, wet


def test_a_build_killed_inside_a_row_group_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    """Kill -9 again and again in one row group: the end equals an undisturbed build."""
    rng = random.Random(3)
    texts = ["".join(rng.choices("abcdefghij   ", k=rng.randint(1, 9000))) for _ in range(250)]
    pq.write_table(table(texts), tmp_path / "a.parquet", row_group_size=250)
    tokenizer = tmp_path / "tokenizer.json"
    train_tokenizer(
        write_lines(tmp_path / "b.jsonl", texts_of(1, 20)), vocab_size=300, out=tokenizer
    )
    out, journal = tmp_path / "out", tmp_path / "out.partial" / "journal.msgpack"
    command = [sys.executable, "-c", INTERRUPTED, tmp_path / "a.parquet", tokenizer, out]
    kills = 0
    while kills < 2 and killed_after(rng.randint(2, 5), journal, command, rng):
        kills += 1
        assert journal.exists()
    assert kills
    subprocess.run(command, check=True, timeout=120)
    write_lines(tmp_path / "c.jsonl", texts)
    build(
        tmp_path / "c.jsonl",
        tokenizer=tokenizer,
        out=tmp_path / "calm",
        held_out_fraction=0.2,
        shard_size_mib=1,
    )
    made, calm = files_of(out), files_of(tmp_path / "calm")
    del made["build.json"], calm["build.json"]
    assert made == calm


def test_row_groups_that_are_done_are_not_decoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going on in the third row group decodes it alone, and those after it."""
    pq.write_table(table([str(n) for n in range(1000)]), tmp_path / "a.parquet", row_group_size=250)
    documents = list(find_corpus(tmp_path / "a.parquet").documents())
    decoded: list[list[int]] = []
    decode = pq.ParquetFile.iter_batches

    def watched(self: object, *sizes: int, row_groups: list[int], **more: object) -> object:
        decoded.append(row_groups)
        return decode(self, *sizes, row_groups=row_groups, **more)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", watched)
    source = find_corpus(tmp_path / "a.parquet")
    rest = [one.text for one in source.documents(documents[600].after)]
    assert rest == [str(n) for n in range(601, 1000)]
    assert decoded == [[2], [2], [3], [3]]  # each is looked at, and then decoded


FOOTERS = """
import sys
from pathlib import Path
from ms_data import CorpusError
from ms_data.corpus.find import find_corpus

path = Path(sys.argv[1])
content = path.read_bytes()
begin = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
for at in range(begin, len(content) - 8):
    if content[at] != 2:
        continue
    path.write_bytes(content[:at] + b"\\0" + content[at + 1 :])
    try:
        print(sum(1 for _ in find_corpus(path).documents()))
    except CorpusError as error:
        print(error)
"""


def test_a_footer_that_contradicts_itself_does_not_end_the_process(tmp_path: Path) -> None:
    """A column that is said to be required, beside counts of its empty rows.

    pyarrow aborts over it where it is asked for the column, and raises where it is asked for rows.
    """
    pq.write_table(table(["a", "b", "c"]), tmp_path / "a.parquet")
    done = subprocess.run(
        [sys.executable, "-c", FOOTERS, tmp_path / "a.parquet"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "histogram size mismatch" in done.stdout


READ = """
import re, sys
import pyarrow.ipc, pyarrow.parquet
from ms_data.corpus import arrow_messages, parquet_pages
from ms_data.corpus.find import find_corpus
from ms_data.corpus.parquet_pages import read_header
# ru_maxrss begins with that of the process that started this one.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
before = peak()
try:
    print(sum(len(one.text) for one in find_corpus(sys.argv[1]).documents()), end=" ")
except ValueError as error:
    print(str(error).replace(" ", "_"), end=" ")
print(peak() - before)
"""


def read_apart(path: Path) -> tuple[str, int]:
    """What is read of a file by a process of its own, and by how many MiB its memory grows."""
    command = [sys.executable, "-c", READ, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    outcome, grown = done.stdout.split()
    return outcome, int(grown) >> 10


def write_large(path: Path, groups: int, group_mib: int) -> int:
    """Random text of some KiB a row, in large row groups; returns its characters."""
    rng = random.Random(0)
    size = 0
    schema = pa.schema({"text": pa.string()})
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for _ in range(groups):
            block = rng.randbytes(1 << 20).hex()
            rows = [block[at : at + 4096] for at in range(0, len(block), 4096)]
            texts = rows * (group_mib // 2)
            size += sum(map(len, texts))
            writer.write_table(pa.table({"text": texts}), row_group_size=len(texts))
    return size


@pytest.mark.parametrize(
    ("groups", "group_mib"), [(2, 64), pytest.param(8, 256, marks=pytest.mark.slow)]
)
def test_a_large_table_is_read_in_flat_memory(tmp_path: Path, groups: int, group_mib: int) -> None:
    """128 MiB in two row groups, or 2 GiB in eight: memory grows by some batches alone."""
    size = write_large(tmp_path / "a.parquet", groups, group_mib)
    assert (tmp_path / "a.parquet").stat().st_size >= groups * group_mib << 20
    outcome, grown = read_apart(tmp_path / "a.parquet")
    assert outcome == str(size)
    assert grown < 96  # 73 and 72


def header(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, link: str = "") -> bytes:
    """The header of a member, as any tool may write it."""
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, link
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
def test_archives_that_lead_astray_are_refused(tmp_path: Path, case: str) -> None:
    """Links, devices, paths that lead out, sizes that lie: one line, also when skipping."""
    content, match = HOSTILE[case]
    ending = b"" if case == "no end" else bytes(1024)
    (tmp_path / "a.tar").write_bytes(content + ending)
    with pytest.raises(CorpusError, match=rf"a\.tar: damaged tar archive \(.*{match}"):
        found(tmp_path / "a.tar")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def test_samples_of_an_archive_that_are_no_text_are_named(tmp_path: Path) -> None:
    """Without a text, not UTF-8, too long or no row; archives laid end to end are read on."""
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
    tar_of(tmp_path / "a.tar", members)
    (tmp_path / "a.tar").write_bytes(2 * (tmp_path / "a.tar").read_bytes())
    texts, reasons = found(tmp_path / "a.tar", document_limit_mib=1)
    assert texts == ["one", "from a row", "the text"] * 2
    for reason, match in zip(
        reasons,
        ["b: no .txt or .json member", "c.txt: not UTF-8", "d.txt: longer", "e.json: "],
        strict=False,
    ):
        assert f"a.tar: {match}" in reason


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_a_flipped_bit_is_found_or_changes_a_text_alone(make: Make, tmp_path: Path) -> None:
    """Never anything but a word about it: in every kind of file, plain and packed."""
    place = make(tmp_path)
    files = sorted(path for path in place.rglob("*") if path.is_file()) or [place]
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
        said = ""
        try:
            assert len(found(place)[0]) <= len(TEXTS)
        except CorpusError as error:
            said = str(error)
        assert not said or ("\n" not in said and str(place.parent) in said)
        path.write_bytes(content)


def test_a_cut_archive_or_table_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    """Whatever is missing at the end of a file, the end is missed.

    But for a web archive that ends with a record: its format marks no end of the whole.
    """
    for make in MAKES:
        folder = tmp_path / make.__name__
        folder.mkdir()
        place = make(folder)
        if place.is_dir() or ".csv" in place.name or ".tsv" in place.name:
            continue
        content = place.read_bytes()
        texts, _ = found(place)
        for share in (0.2, 0.5, 0.9):
            cut = int(len(content) * share)
            if content.startswith(b"\x1f\x8b\x08", cut):  # where a record ends: see the next test
                cut -= 1
            place.write_bytes(content[:cut])
            with pytest.raises(CorpusError):
                assert found(place)[0] == texts


def test_a_web_archive_that_ends_with_a_record_is_a_whole_one(tmp_path: Path) -> None:
    """Its format marks no end of the whole, so that the records before the cut are all there is."""
    place = wet(tmp_path)
    content = place.read_bytes()
    texts, _ = found(place)
    place.write_bytes(content[: content.index(b"\x1f\x8b\x08", len(content) // 2)])
    fewer, _ = found(place)
    assert 0 < len(fewer) < len(texts)
    assert fewer == texts[: len(fewer)]


def test_a_value_that_many_rows_share_takes_little_memory(tmp_path: Path) -> None:
    """Four gigabytes of text in some kilobytes: few rows are decoded at a time."""
    one = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), ["y" * (4 << 20)])
    pq.write_table(pa.table({"text": one}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    outcome, grown = read_apart(tmp_path / "a.parquet")
    assert outcome == str(4000 << 20)
    assert grown < 400


def test_pages_and_batches_that_unpack_to_too_much_are_refused_before_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what they say of themselves; so are sizes that lie."""
    monkeypatch.setattr(parquet_pages, "PAGE_LIMIT_MIB", 1)
    monkeypatch.setattr(arrow_messages, "BATCH_LIMIT_MIB", 1)
    texts = pa.table({"text": ["x" * (3 << 20)]})
    for packing in ("zstd", "none"):
        pq.write_table(texts, tmp_path / "a.parquet", compression=packing, use_dictionary=False)
        with pytest.raises(CorpusError, match=r"3 MiB.*more than 1: write the table"):
            found(tmp_path / "a.parquet")
        pa.feather.write_feather(
            texts, tmp_path / "b.arrow", compression=packing.replace("none", "uncompressed")
        )
        with pytest.raises(CorpusError, match=r"a record batch of 3 MiB, more than 1: write"):
            found(tmp_path / "b.arrow")


@pytest.mark.parametrize("lie", [(2, 1 << 30), (3, 1 << 30), (2, -5), (3, -5)])
def test_a_page_that_lies_about_its_size_is_refused(tmp_path: Path, lie: tuple[int, int]) -> None:
    """More than its column says that it holds, packed or unpacked, or less than nothing."""
    place = parquet(tmp_path)
    content = place.read_bytes()
    column = pq.ParquetFile(place).metadata.row_group(0).column(1)
    at = column.dictionary_page_offset
    header = read_header(content[at:])
    fields = [0, header.uncompressed_bytes, header.compressed_bytes]
    fields[lie[0] - 1] = lie[1]
    numbers = b"".join(b"\x15" + zigzag(one) for one in (2, *fields[1:]))
    changed = content[:at] + numbers + content[at + len(numbers) :]
    place.write_bytes(changed)
    with pytest.raises(CorpusError, match=r"a\.parquet: damaged Parquet table \(the page at"):
        found(place)


def zigzag(value: int) -> bytes:
    """A number with its sign, as Thrift's compact protocol writes it."""
    left = (value << 1) ^ (value >> 63)
    parts = []
    while left > 127:
        parts.append(left & 127 | 128)
        left >>= 7
    return bytes([*parts, left])
