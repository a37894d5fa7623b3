"""The same rows give the same documents in every file format and on every file system."""

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

from .test_build import random_texts, read_files, write_lines

TEXTS = [
    *random_texts(7, 300),
    'a "quoted" word, a comma\tand a tab',
    "two\nlines\r\nand a third",
    "  spaces kept  ",
    "",
    "\N{BYTE ORDER MARK}a mark within",
    "naïve 日本 \U0001f600",
]
CorpusWriter = Callable[[Path], Path]


def to_table(texts: list[str | None]) -> pa.Table:
    """Return a table with a text column and another one."""
    return pa.table({"id": range(len(texts)), "text": texts})


def write_tar(
    path: Path, members: list[tuple[str, bytes]], format_: int = tarfile.PAX_FORMAT
) -> Path:
    """Write an archive with the standard library."""
    with tarfile.open(path, "w", format=format_) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_parquet(folder: Path) -> Path:
    """Several row groups, dictionary pages and zstd compression."""
    pq.write_table(to_table(TEXTS), folder / "a.parquet", row_group_size=90, compression="zstd")
    return folder / "a.parquet"


def write_plain_parquet(folder: Path) -> Path:
    """No dictionaries or compression; delta encoding, where values share prefixes."""
    path = folder / "no suffix that says so"
    encodings = {"text": "DELTA_BYTE_ARRAY", "id": "PLAIN"}
    options = {"use_dictionary": False, "compression": "none", "column_encoding": encodings}
    pq.write_table(to_table(TEXTS), path, **options)
    return path


def write_large_string_parquet(folder: Path) -> Path:
    """A column of type large_string."""
    wide = pa.table({"text": pa.array(TEXTS, pa.large_string())})
    pq.write_table(wide, folder / "a.parquet", use_dictionary=["text"])
    return folder / "a.parquet"


def write_arrow_stream(folder: Path) -> Path:
    """An Arrow stream of several batches."""
    with pa.ipc.new_stream(folder / "a.arrow", to_table(TEXTS).schema) as writer:
        writer.write_table(to_table(TEXTS), max_chunksize=70)
    return folder / "a.arrow"


def write_feather(folder: Path) -> Path:
    """A Feather file, compressed inside."""
    pa.feather.write_feather(
        to_table(TEXTS), folder / "a.feather", chunksize=70, compression="zstd"
    )
    return folder / "a.feather"


def write_dictionary_stream(folder: Path) -> Path:
    """A dictionary-encoded column in a gzipped stream."""
    coded = pa.table({"text": pa.array(TEXTS).dictionary_encode()})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, coded.schema) as writer:
        writer.write_table(coded)
    (folder / "a.arrow.gz").write_bytes(gzip.compress(sink.getvalue()))
    return folder / "a.arrow.gz"


def write_string_views(folder: Path) -> Path:
    """String views, which store short strings inline."""
    views = pa.table({"text": pa.array(TEXTS).cast(pa.string_view())})
    with pa.ipc.new_file(folder / "a.arrow", views.schema) as writer:
        writer.write_table(views)
    return folder / "a.arrow"


def write_csv(folder: Path, *, name: str = "a.csv", delimiter: str = ",") -> Path:
    """CSV written by the standard library, zstd-compressed if the name says so."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter=delimiter, lineterminator="\n")
    writer.writerow(["id", "text"])
    writer.writerows(enumerate(TEXTS))
    content = buffer.getvalue().encode()
    path = folder / name
    path.write_bytes(zstandard.compress(content) if name.endswith("zst") else content)
    return path


def write_tsv(folder: Path) -> Path:
    """Compressed TSV."""
    return write_csv(folder, name="a.tsv.zst", delimiter="\t")


def write_saved_dataset(folder: Path) -> Path:
    """A folder saved by `datasets`, in three shards."""
    datasets.Dataset(to_table(TEXTS)).save_to_disk(folder / "saved", num_shards=3)
    return folder / "saved"


def write_hub_folder(folder: Path) -> Path:
    """Parquet shards next to a dataset card, as on the Hub."""
    (folder / "hub" / "data").mkdir(parents=True)
    (folder / "hub" / "README.md").write_text("---\nlicense: mit\n---\n# A set\n")
    (folder / "hub" / ".gitattributes").write_text("*.parquet filter=lfs\n")
    for number, part in enumerate((to_table(TEXTS[:111]), to_table(TEXTS[111:]))):
        pq.write_table(part, folder / "hub" / "data" / f"train-{number:05d}-of-00002.parquet")
    return folder / "hub"


def write_text_tar(folder: Path) -> Path:
    """One sample per row: its text and a non-text member."""
    members = []
    for number, text in enumerate(TEXTS):
        members += [(f"x/{number:06d}.txt", text.encode()), (f"x/{number:06d}.cls", b"3")]
    return write_tar(folder / "a.tar", members)


def write_json_tar(folder: Path) -> Path:
    """JSON rows in a gzipped GNU archive, with names too long for one header."""
    rows = [json.dumps({"text": text}).encode() for text in TEXTS]
    names = (f"{'long/' * 40}{number:06d}.json" for number in range(len(rows)))
    path = write_tar(folder / "b.tar", list(zip(names, rows, strict=True)), tarfile.GNU_FORMAT)
    (folder / "b.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    return folder / "b.tar.gz"


def write_wet(folder: Path) -> Path:
    """WARC conversion records, each gzipped separately, with fixed ids and dates."""
    path = folder / "a.warc.wet.gz"
    records = [("warcinfo", "", "software: a test\r\n")]
    records += [("conversion", f"http://example.org/{n}", text) for n, text in enumerate(TEXTS)]
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=True)
        for number, (record_type, address, text) in enumerate(records):
            record = writer.create_warc_record(
                address,
                record_type,
                payload=io.BytesIO(text.encode()),
                warc_content_type="text/plain",
                warc_headers_dict={  # the library defaults to a random id and the current time
                    "WARC-Record-ID": f"<urn:uuid:00000000-0000-4000-8000-{number:012d}>",
                    "WARC-Date": "2026-01-01T00:00:00Z",
                },
            )
            writer.write_record(record)
            record.raw_stream.close()
    return path


CORPUS_WRITERS = (
    *(
        write_parquet,
        write_plain_parquet,
        write_large_string_parquet,
        write_arrow_stream,
        write_feather,
        write_dictionary_stream,
    ),
    *(
        write_string_views,
        write_csv,
        write_tsv,
        write_saved_dataset,
        write_hub_folder,
        write_text_tar,
        write_json_tar,
        write_wet,
    ),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small BPE tokenizer trained on the texts."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return train_tokenizer(write_lines(folder / "a.jsonl", TEXTS), vocab_size=300)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> dict[str, bytes]:
    """The dataset built from JSON Lines, except for its build record."""
    folder = tmp_path_factory.mktemp("lines")
    lines = write_lines(folder / "a.jsonl", TEXTS)
    build(lines, tokenizer=tokenizer, out=folder / "out", held_out_fraction=0.2)
    return {
        name: content
        for name, content in read_files(folder / "out").items()
        if name != "build.json"
    }


@pytest.mark.parametrize(
    "write_corpus", CORPUS_WRITERS, ids=lambda write_corpus: write_corpus.__name__
)
def test_every_format_builds_the_same_shards_as_json_lines(
    write_corpus: CorpusWriter, tokenizer: Tokenizer, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """Reading also resumes after any row."""
    corpus = write_corpus(tmp_path)
    build(corpus, tokenizer=tokenizer, out=tmp_path / "out", held_out_fraction=0.2)
    actual = read_files(tmp_path / "out")
    del actual["build.json"]
    assert actual == expected
    source = find_corpus(corpus)
    documents = list(source.documents())
    assert [document.text for document in documents] == [text for text in TEXTS if text]
    assert documents[-1].read_bytes <= source.size_bytes
    assert [document.read_bytes for document in documents] == sorted(
        document.read_bytes for document in documents
    )
    for index in random.Random(0).sample(range(len(documents)), 5):
        remaining = [document.text for document in source.documents(documents[index].after)]
        assert remaining == [document.text for document in documents[index + 1 :]]


def test_a_list_of_corpora_is_read_in_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Files and folders of several kinds."""
    first, second = tmp_path / "b", tmp_path / "a"
    first.mkdir()
    second.mkdir()
    (first / "x.txt").write_text("one")
    pq.write_table(to_table(["two", "three"]), first / "y.parquet")
    write_lines(second / "z.jsonl", ["four"])
    source = find_corpus([first, str(second / "z.jsonl")])
    assert [document.text for document in source.documents()] == ["one", "two", "three", "four"]
    summary = build([first, second], tokenizer=tokenizer, out=tmp_path / "out")
    assert summary.documents == 4
    assert build([first, second], tokenizer=tokenizer, out=tmp_path / "out").built_before
    with pytest.raises(CorpusError, match="no file or folder"):
        find_corpus([first, tmp_path / "nowhere"])
    with pytest.raises(CorpusError, match="the corpus is an empty list"):
        find_corpus([])


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """An S3-compatible server in this process."""
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
def test_remote_corpora_are_read_like_local_ones(
    store: str, tokenizer: Tokenizer, expected: dict[str, bytes], tmp_path: Path, bucket: str
) -> None:
    """Folders and files in memory and on S3, and a missing path."""
    root = bucket if store == "s3" else "memory://corpus"
    filesystem, path = fsspec.core.url_to_fs(root)
    pq.write_table(to_table(TEXTS[:50]), tmp_path / "a.parquet")
    write_lines(tmp_path / "b.jsonl.zst", TEXTS[50:100])
    write_lines(tmp_path / "rest.jsonl", TEXTS[100:])
    for name in ("a.parquet", "b.jsonl.zst"):
        filesystem.put_file(str(tmp_path / name), f"{path}/x/{name}")
    filesystem.put_file(str(tmp_path / "rest.jsonl"), f"{path}/rest.jsonl")
    filesystem.put_file(str(tmp_path / "rest.jsonl"), f"{path}/x/.hidden/rest.jsonl")
    corpus = [f"{root}/x", f"{root}/rest.jsonl"]
    build(corpus, tokenizer=tokenizer, out=tmp_path / "out", held_out_fraction=0.2)
    actual = read_files(tmp_path / "out")
    del actual["build.json"]
    assert actual == expected
    rebuilt = build(corpus, tokenizer=tokenizer, out=tmp_path / "out", held_out_fraction=0.2)
    assert rebuilt.built_before
    source = find_corpus(corpus)
    (document, *_) = source.documents(Position(1, 7))
    assert document.text == TEXTS[57]
    with pytest.raises(CorpusError, match=f"{root}/nowhere"):
        find_corpus(f"{root}/nowhere")


def test_unreachable_corpora_are_refused_in_one_line(tmp_path: Path) -> None:
    """An unknown protocol, and a missing file."""
    with pytest.raises(CorpusError, match="nothing://x: cannot be reached: Protocol not known"):
        find_corpus("nothing://x")
    with pytest.raises(CorpusError, match="there is nothing at memory://no/such; check"):
        find_corpus("memory://no/such")


def read_corpus(path: Path, **options: Any) -> tuple[list[str], list[str]]:
    """Return the texts of a corpus and the reasons for skipped documents."""
    reasons: list[str] = []
    source = find_corpus(path, skip_invalid=True, **options)
    return [document.text for document in source.documents(on_skip=reasons.append)], reasons


def test_rows_with_unusable_text_are_skipped_and_named(tmp_path: Path) -> None:
    """Missing, too long or invalid UTF-8; the reason names the row."""
    long = "x" * ((1 << 20) + 1)
    pq.write_table(to_table(["one", None, long, "two"]), tmp_path / "a.parquet")
    texts, reasons = read_corpus(tmp_path / "a.parquet", document_limit_mib=1)
    assert texts == ["one", "two"]
    assert "a.parquet: row 2: text is missing (null); name" in reasons[0]
    assert "a.parquet: row 3: longer than" in reasons[1]
    with pytest.raises(CorpusError, match=r"row 2: text is missing .*--skip-invalid"):
        list(find_corpus(tmp_path / "a.parquet").documents())
    bad = pa.array([b"one", b"a \xff", b"two"]).view(pa.string())
    with pa.ipc.new_stream(tmp_path / "b.arrow", pa.schema({"text": pa.string()})) as writer:
        writer.write_table(pa.table({"text": bad}))
    texts, (reason,) = read_corpus(tmp_path / "b.arrow")
    assert texts == ["one", "two"]
    assert "row 2: not UTF-8: byte 0xff at offset 2" in reason
    (tmp_path / "c.csv").write_bytes(b'text,n\none,1\nmany,2,3\n"a"b,1\n\xff,1\ntwo,2\n')
    texts, reasons = read_corpus(tmp_path / "c.csv")
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
    """The error lists the columns or the type; another column can be selected."""
    columns, match = WRONG_COLUMNS[case]
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=match):
        list(find_corpus(tmp_path / "a.parquet").documents())
    pq.write_table(pa.table({**columns, "other": ["y"]}), tmp_path / "a.parquet")
    assert read_corpus(tmp_path / "a.parquet", text_column="other") == (["y"], [])


def test_a_saved_dataset_is_read_by_its_state_file(tmp_path: Path) -> None:
    """Extra files are ignored; a missing shard or several splits are refused."""
    both = datasets.DatasetDict(
        {name: datasets.Dataset(to_table([name])) for name in ("train", "test")}
    )
    both.save_to_disk(tmp_path / "both")
    with pytest.raises(
        CorpusError, match="both holds the splits train, test; pass the ones to read"
    ):
        find_corpus(tmp_path / "both")
    train_folder = tmp_path / "both" / "train"
    (train_folder / "cache-0123.arrow").write_bytes(
        (train_folder / "data-00000-of-00001.arrow").read_bytes()
    )
    assert read_corpus(train_folder) == (["train"], [])
    source = find_corpus([train_folder, tmp_path / "both" / "test"])
    assert [document.text for document in source.documents()] == ["train", "test"]
    (train_folder / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(CorpusError, match=r"lists 'data-00000-of-00001.arrow', but it is missing"):
        find_corpus(train_folder)


def test_web_archives_yield_the_text_of_successful_html_responses(tmp_path: Path) -> None:
    """Any charset and transfer encoding; other content types and statuses are ignored."""
    page = "<meta charset=latin-1><title>T</title><script>x</script><h1>Größe</h1><p>ein <b>Satz"
    body = page.encode("latin-1")
    compressed = gzip.compress(body)
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(compressed), compressed)
    encodings = [("Content-Encoding", "gzip"), ("Transfer-Encoding", "chunked")]
    html = ("Content-Type", "text/html")
    responses = [
        (body, "200 OK", [html]),
        (chunks, "200 OK", [html, *encodings]),
        ("é".encode("latin-1"), "200 OK", [("Content-Type", "text/plain; charset=latin-1")]),
        (body, "404 Not Found", [html]),
        (b"\x89PNG", "200 OK", [("Content-Type", "image/png")]),
    ]
    with (tmp_path / "a.warc").open("wb") as file:
        writer = WARCWriter(file, gzip=False)
        for content, status, fields in responses:
            headers = StatusAndHeaders(status, fields, protocol="HTTP/1.1")
            record = writer.create_warc_record(
                "http://example.org/", "response", io.BytesIO(content), http_headers=headers
            )
            writer.write_record(record)
    texts, reasons = read_corpus(tmp_path / "a.warc")
    assert (texts, reasons) == (["Größe\n\nein Satz", "Größe\n\nein Satz", "é"], [])


def test_the_command_names_skipped_documents(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line per document with its location; `--strict` stops at the first."""
    pq.write_table(to_table(["one", None, "two", None]), tmp_path / "a.parquet")
    (tmp_path / "t.json").write_bytes(tokenizer.content)
    command = ["build", str(tmp_path / "a.parquet"), "--tokenizer", str(tmp_path / "t.json")]
    assert main([*command, "--out", str(tmp_path / "out"), "--skip-invalid"]) == 0
    printed = capsys.readouterr()
    assert "2 documents, 2 invalid ones skipped" in printed.out
    for row in (2, 4):
        assert f"skipped: {tmp_path}/a.parquet: row {row}: text is missing (null)" in printed.err
    assert main([*command, "--out", str(tmp_path / "none"), "--strict"]) == 2
    assert "row 2: text is missing" in capsys.readouterr().err
