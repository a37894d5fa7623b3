"""The same rows are the same documents, whatever kind of file holds them and wherever it lies."""

import csv
import gzip
import io
import json
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import zstandard
from moto.server import ThreadedMotoServer
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from ms_data import CorpusError, Tokenizer, build, train_tokenizer
from ms_data.cli import main
from ms_data.corpus.corpus import Position
from ms_data.corpus.find import find_corpus

from .test_build import files_of, texts_of, write_lines

TEXTS = [
    *texts_of(7, 300),
    'a "quoted" word, a comma\tand a tab',
    "two\nlines\r\nand a third",
    "  spaces kept  ",
    "",
    "\N{BYTE ORDER MARK}a mark within",
    "naïve 日本 \U0001f600",
]
Make = Callable[[Path], Path]


def table(texts: list[str | None]) -> pa.Table:
    """A table whose text is one column of several."""
    return pa.table({"id": range(len(texts)), "text": texts})


def tar_of(path: Path, members: list[tuple[str, bytes]], format_: int = tarfile.PAX_FORMAT) -> Path:
    """An archive by the standard library's own writer."""
    with tarfile.open(path, "w", format=format_) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def parquet(folder: Path) -> Path:
    """Several row groups, dictionary pages and a packing of its own."""
    pq.write_table(table(TEXTS), folder / "a.parquet", row_group_size=90, compression="zstd")
    return folder / "a.parquet"


def plain_parquet(folder: Path) -> Path:
    """Without dictionaries, not packed, each value sharing the start of the one before."""
    path = folder / "no suffix that says so"
    encodings = {"text": "DELTA_BYTE_ARRAY", "id": "PLAIN"}
    options = {"use_dictionary": False, "compression": "none", "column_encoding": encodings}
    pq.write_table(table(TEXTS), path, **options)
    return path


def large_parquet(folder: Path) -> Path:
    """A column of large strings."""
    wide = pa.table({"text": pa.array(TEXTS, pa.large_string())})
    pq.write_table(wide, folder / "a.parquet", use_dictionary=["text"])
    return folder / "a.parquet"


def arrow_stream(folder: Path) -> Path:
    """A stream of batches."""
    with pa.ipc.new_stream(folder / "a.arrow", table(TEXTS).schema) as writer:
        writer.write_table(table(TEXTS), max_chunksize=70)
    return folder / "a.arrow"


def arrow_file(folder: Path) -> Path:
    """A file that lists its batches at its end, packed as Feather packs it."""
    pa.feather.write_feather(table(TEXTS), folder / "a.feather", chunksize=70, compression="zstd")
    return folder / "a.feather"


def dictionary_stream(folder: Path) -> Path:
    """Numbers into a dictionary, in a stream that is packed by gzip."""
    coded = pa.table({"text": pa.array(TEXTS).dictionary_encode()})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, coded.schema) as writer:
        writer.write_table(coded)
    (folder / "a.arrow.gz").write_bytes(gzip.compress(sink.getvalue()))
    return folder / "a.arrow.gz"


def string_views(folder: Path) -> Path:
    """Short strings in place, long ones elsewhere."""
    views = pa.table({"text": pa.array(TEXTS).cast(pa.string_view())})
    with pa.ipc.new_file(folder / "a.arrow", views.schema) as writer:
        writer.write_table(views)
    return folder / "a.arrow"


def delimited(folder: Path, *, name: str = "a.csv", delimiter: str = ",") -> Path:
    """What Python's own module writes, packed where its name says so."""
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
    writer.writerow(["id", "text"])
    writer.writerows(enumerate(TEXTS))
    content = file.getvalue().encode()
    path = folder / name
    path.write_bytes(zstandard.compress(content) if name.endswith("zst") else content)
    return path


def tabbed(folder: Path) -> Path:
    """With tabs, packed."""
    return delimited(folder, name="a.tsv.zst", delimiter="\t")


def saved(folder: Path) -> Path:
    """What `datasets` itself saves, in three shards."""
    datasets.Dataset(table(TEXTS)).save_to_disk(folder / "saved", num_shards=3)
    return folder / "saved"


def hub_folder(folder: Path) -> Path:
    """Parquet beside a card, as the Hub holds it."""
    (folder / "hub" / "data").mkdir(parents=True)
    (folder / "hub" / "README.md").write_text("---\nlicense: mit\n---\n# A set\n")
    (folder / "hub" / ".gitattributes").write_text("*.parquet filter=lfs\n")
    for number, part in enumerate((table(TEXTS[:111]), table(TEXTS[111:]))):
        pq.write_table(part, folder / "hub" / "data" / f"train-{number:05d}-of-00002.parquet")
    return folder / "hub"


def tar(folder: Path) -> Path:
    """A sample a row: its text, and something that is none."""
    members = []
    for number, text in enumerate(TEXTS):
        members += [(f"x/{number:06d}.txt", text.encode()), (f"x/{number:06d}.cls", b"3")]
    return tar_of(folder / "a.tar", members)


def tar_of_rows(folder: Path) -> Path:
    """Rows as JSON in GNU's archive, with names too long for one header."""
    rows = [json.dumps({"text": text}).encode() for text in TEXTS]
    names = (f"{'long/' * 40}{number:06d}.json" for number in range(len(rows)))
    path = tar_of(folder / "b.tar", list(zip(names, rows, strict=True)), tarfile.GNU_FORMAT)
    (folder / "b.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    return folder / "b.tar.gz"


def wet(folder: Path) -> Path:
    """Records of text, each packed by itself; the same bytes in each run."""
    path = folder / "a.warc.wet.gz"
    records = [("warcinfo", "", "software: a test\r\n")]
    records += [("conversion", f"http://example.org/{n}", text) for n, text in enumerate(TEXTS)]
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=True)
        for number, (kind, address, text) in enumerate(records):
            record = writer.create_warc_record(
                address,
                kind,
                payload=io.BytesIO(text.encode()),
                warc_content_type="text/plain",
                warc_headers_dict={  # the library would draw an id, and take the time
                    "WARC-Record-ID": f"<urn:uuid:00000000-0000-4000-8000-{number:012d}>",
                    "WARC-Date": "2026-01-01T00:00:00Z",
                },
            )
            writer.write_record(record)
            record.raw_stream.close()
    return path


MAKES = (
    *(parquet, plain_parquet, large_parquet, arrow_stream, arrow_file, dictionary_stream),
    *(string_views, delimited, tabbed, saved, hub_folder, tar, tar_of_rows, wet),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small BPE of the texts."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return train_tokenizer(write_lines(folder / "a.jsonl", TEXTS), vocab_size=300)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> dict[str, bytes]:
    """The dataset that is built from JSON Lines, but for the record of where it came from."""
    folder = tmp_path_factory.mktemp("lines")
    lines = write_lines(folder / "a.jsonl", TEXTS)
    build(lines, tokenizer=tokenizer, out=folder / "out", held_out_fraction=0.2)
    return {name: one for name, one in files_of(folder / "out").items() if name != "build.json"}


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_the_same_rows_give_the_same_shards_byte_for_byte(
    make: Make, tokenizer: Tokenizer, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """As from JSON Lines; and reading goes on from every row."""
    place = make(tmp_path)
    build(place, tokenizer=tokenizer, out=tmp_path / "out", held_out_fraction=0.2)
    made = files_of(tmp_path / "out")
    del made["build.json"]
    assert made == expected
    source = find_corpus(place)
    documents = list(source.documents())
    assert [one.text for one in documents] == [text for text in TEXTS if text]
    assert documents[-1].read_bytes <= source.size_bytes
    assert [one.read_bytes for one in documents] == sorted(one.read_bytes for one in documents)
    for at in random.Random(0).sample(range(len(documents)), 5):
        rest = [one.text for one in source.documents(documents[at].after)]
        assert rest == [one.text for one in documents[at + 1 :]]


def test_several_corpora_are_read_one_after_the_other(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Files and folders of several kinds, in the order in which they are given."""
    first, second = tmp_path / "b", tmp_path / "a"
    first.mkdir()
    second.mkdir()
    (first / "x.txt").write_text("one")
    pq.write_table(table(["two", "three"]), first / "y.parquet")
    write_lines(second / "z.jsonl", ["four"])
    source = find_corpus([first, str(second / "z.jsonl")])
    assert [one.text for one in source.documents()] == ["one", "two", "three", "four"]
    summary = build([first, second], tokenizer=tokenizer, out=tmp_path / "out")
    assert summary.documents == 4
    assert build([first, second], tokenizer=tokenizer, out=tmp_path / "out").built_before
    with pytest.raises(CorpusError, match="no file or folder"):
        find_corpus([first, tmp_path / "nowhere"])
    with pytest.raises(CorpusError, match="the corpus is an empty list"):
        find_corpus([])


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A store that speaks S3, in this process."""
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        }.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("corpus")
        yield "s3://corpus"
    server.stop()


@pytest.mark.parametrize("store", ["memory", "s3"])
def test_a_corpus_elsewhere_is_read_like_one_on_a_disk(
    store: str, tokenizer: Tokenizer, expected: dict[str, bytes], tmp_path: Path, bucket: str
) -> None:
    """A folder in memory and in a store of S3's kind; a file there; and what is not there."""
    root = bucket if store == "s3" else "memory://corpus"
    filesystem, path = fsspec.core.url_to_fs(root)
    pq.write_table(table(TEXTS[:50]), tmp_path / "a.parquet")
    write_lines(tmp_path / "b.jsonl.zst", TEXTS[50:100])
    write_lines(tmp_path / "rest.jsonl", TEXTS[100:])
    for name in ("a.parquet", "b.jsonl.zst"):
        filesystem.put_file(str(tmp_path / name), f"{path}/x/{name}")
    filesystem.put_file(str(tmp_path / "rest.jsonl"), f"{path}/rest.jsonl")
    filesystem.put_file(str(tmp_path / "rest.jsonl"), f"{path}/x/.hidden/rest.jsonl")
    corpus = [f"{root}/x", f"{root}/rest.jsonl"]
    build(corpus, tokenizer=tokenizer, out=tmp_path / "out", held_out_fraction=0.2)
    made = files_of(tmp_path / "out")
    del made["build.json"]
    assert made == expected
    again = build(corpus, tokenizer=tokenizer, out=tmp_path / "out", held_out_fraction=0.2)
    assert again.built_before
    source = find_corpus(corpus)
    (document, *_) = source.documents(Position(1, 7))
    assert document.text == TEXTS[57]
    with pytest.raises(CorpusError, match=f"{root}/nowhere"):
        find_corpus(f"{root}/nowhere")


def test_what_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    """A protocol that nobody knows, and a client that is not there."""
    with pytest.raises(CorpusError, match="nothing://x: cannot be reached: Protocol not known"):
        find_corpus("nothing://x")
    with pytest.raises(CorpusError, match="there is nothing at memory://no/such; check"):
        find_corpus("memory://no/such")


def found(place: Path, **options: Any) -> tuple[list[str], list[str]]:
    """The texts of a corpus and why others were left out."""
    reasons: list[str] = []
    source = find_corpus(place, skip_invalid=True, **options)
    return [one.text for one in source.documents(on_skip=reasons.append)], reasons


def test_a_row_without_its_text_is_named_and_left_out(tmp_path: Path) -> None:
    """Missing, too long or no UTF-8: the others are read, and each is said with its row."""
    long = "x" * ((1 << 20) + 1)
    pq.write_table(table(["one", None, long, "two"]), tmp_path / "a.parquet")
    texts, reasons = found(tmp_path / "a.parquet", document_limit_mib=1)
    assert texts == ["one", "two"]
    assert "a.parquet: row 2: text is missing (null); name" in reasons[0]
    assert "a.parquet: row 3: longer than" in reasons[1]
    with pytest.raises(CorpusError, match=r"row 2: text is missing .*--skip-invalid"):
        list(find_corpus(tmp_path / "a.parquet").documents())
    bad = pa.array([b"one", b"a \xff", b"two"]).view(pa.string())
    with pa.ipc.new_stream(tmp_path / "b.arrow", pa.schema({"text": pa.string()})) as writer:
        writer.write_table(pa.table({"text": bad}))
    texts, (reason,) = found(tmp_path / "b.arrow")
    assert texts == ["one", "two"]
    assert "row 2: not UTF-8: byte 0xff at offset 2" in reason
    (tmp_path / "c.csv").write_bytes(b'text,n\none,1\nmany,2,3\n"a"b,1\n\xff,1\ntwo,2\n')
    texts, reasons = found(tmp_path / "c.csv")
    assert texts == ["one", "two"]
    assert [reason.partition(": ")[2][:5] for reason in reasons] == ["row 2", "row 3", "row 4"]


WRONG_COLUMNS: dict[str, tuple[Any, str]] = {
    "no such column": (
        {"body": ["x"]},
        "no column 'text'; the columns are: body; name .*--text-column",
    ),
    "numbers": ({"text": [3]}, "column 'text' has type int64, not text"),
    "lists": ({"text": [["x"]]}, "column 'text' has type list<.*, not text"),
}


@pytest.mark.parametrize("case", WRONG_COLUMNS)
def test_a_table_without_a_column_of_text_is_refused(tmp_path: Path, case: str) -> None:
    """By its columns' names and kinds, and read by another name."""
    columns, match = WRONG_COLUMNS[case]
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=match):
        list(find_corpus(tmp_path / "a.parquet").documents())
    pq.write_table(pa.table({**columns, "other": ["y"]}), tmp_path / "a.parquet")
    assert found(tmp_path / "a.parquet", text_column="other") == (["y"], [])


def test_a_saved_dataset_is_read_by_its_own_list(tmp_path: Path) -> None:
    """What lies beside its shards is none of it; a shard that is gone, or several splits, stop."""
    both = datasets.DatasetDict(
        {name: datasets.Dataset(table([name])) for name in ("train", "test")}
    )
    both.save_to_disk(tmp_path / "both")
    with pytest.raises(
        CorpusError, match="both holds the splits train, test; pass the ones to read"
    ):
        find_corpus(tmp_path / "both")
    home = tmp_path / "both" / "train"
    (home / "cache-0123.arrow").write_bytes((home / "data-00000-of-00001.arrow").read_bytes())
    assert found(home) == (["train"], [])
    chosen = find_corpus([home, tmp_path / "both" / "test"])
    assert [one.text for one in chosen.documents()] == ["train", "test"]
    (home / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(CorpusError, match=r"lists 'data-00000-of-00001.arrow', but it is missing"):
        find_corpus(home)


def test_pages_of_the_web_become_their_text(tmp_path: Path) -> None:
    """HTML that was answered, whatever its encoding and packing; nothing that was not."""
    page = "<meta charset=latin-1><title>T</title><script>x</script><h1>Größe</h1><p>ein <b>Satz"
    body = page.encode("latin-1")
    packed = gzip.compress(body)
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(packed), packed)
    packing = [("Content-Encoding", "gzip"), ("Transfer-Encoding", "chunked")]
    html = ("Content-Type", "text/html")
    answers = [
        (body, "200 OK", [html]),
        (chunks, "200 OK", [html, *packing]),
        ("é".encode("latin-1"), "200 OK", [("Content-Type", "text/plain; charset=latin-1")]),
        (body, "404 Not Found", [html]),
        (b"\x89PNG", "200 OK", [("Content-Type", "image/png")]),
    ]
    with (tmp_path / "a.warc").open("wb") as file:
        writer = WARCWriter(file, gzip=False)
        for content, status, fields in answers:
            headers = StatusAndHeaders(status, fields, protocol="HTTP/1.1")
            record = writer.create_warc_record(
                "http://example.org/", "response", io.BytesIO(content), http_headers=headers
            )
            writer.write_record(record)
    texts, reasons = found(tmp_path / "a.warc")
    assert (texts, reasons) == (["Größe\n\nein Satz", "Größe\n\nein Satz", "é"], [])


def test_what_is_left_out_is_named_by_the_command(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each document, with its place; `--strict` stops at the first."""
    pq.write_table(table(["one", None, "two", None]), tmp_path / "a.parquet")
    (tmp_path / "t.json").write_bytes(tokenizer.content)
    command = ["build", str(tmp_path / "a.parquet"), "--tokenizer", str(tmp_path / "t.json")]
    assert main([*command, "--out", str(tmp_path / "out"), "--skip-invalid"]) == 0
    printed = capsys.readouterr()
    assert "2 documents, 2 invalid ones skipped" in printed.out
    for row in (2, 4):
        assert f"skipped: {tmp_path}/a.parquet: row {row}: text is missing (null)" in printed.err
    assert main([*command, "--out", str(tmp_path / "none"), "--strict"]) == 2
    assert "row 2: text is missing" in capsys.readouterr().err
