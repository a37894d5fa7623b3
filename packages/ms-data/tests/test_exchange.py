"""Datasets of other libraries come in and go out with every token and document."""

import gzip
import hashlib
import json
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_data import (
    CorpusError,
    OutputError,
    SettingError,
    Tokenizer,
    TokenStream,
    build,
    export_dataset,
    import_dataset,
    train_tokenizer,
    verify,
)
from ms_data.cli import main
from ms_data.disk.split import Split

from .test_build import documents_in, texts_of, write_lines


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 300 tokens and shards of forty documents."""
    folder = tmp_path_factory.mktemp("place")
    lines = write_lines(folder / "a.jsonl", texts_of(3, 40))
    train_tokenizer(lines, vocab_size=300, out=folder / "tokenizer.json")
    build(lines, tokenizer=folder / "tokenizer.json", out=folder / "shards", held_out_fraction=0.2)
    return folder


def documents_of(folder: Path, split: str = "train") -> list[list[int]]:
    """The tokens of each document, with its end of text."""
    read = Split(folder, split)
    parts = np.split(read.read(0, read.tokens), read.all_ends())
    return [part.tolist() for part in parts[:-1]]


def read_pair(prefix: Path) -> list[list[list[int]]]:
    """The slow truth: Megatron's pair as its documents of sequences, number by number."""
    content, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert content[:9] == b"MMIDIDX\0\0"
    version, code, sequences, bounds = struct.unpack_from("<QBQQ", content, 9)
    assert version == 1
    letter, size = {8: ("H", 2), 4: ("i", 4)}[code]
    lengths = struct.unpack_from(f"<{sequences}i", content, 34)
    begins = struct.unpack_from(f"<{sequences}q", content, 34 + 4 * sequences)
    edges = struct.unpack_from(f"<{bounds}q", content, 34 + 12 * sequences)
    assert len(content) == 34 + 12 * sequences + 8 * bounds
    assert len(tokens) == size * sum(lengths)
    found = [
        list(struct.unpack_from(f"<{length}{letter}", tokens, begin))
        for length, begin in zip(lengths, begins, strict=True)
    ]
    return [found[first:last] for first, last in pairwise(edges)]


def write_pair(prefix: Path, documents: list[list[list[int]]], code: int = 4) -> Path:
    """Megatron's pair of documents of sequences, as its builder writes it."""
    kind = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}[code]
    rows = [np.array(row, kind) for document in documents for row in document]
    sizes = np.array([len(row) for row in rows], "<i4")
    begins = (np.cumsum(sizes, dtype="<i8") - sizes) * np.dtype(kind).itemsize
    edges = np.cumsum([0, *map(len, documents)], dtype="<i8")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(rows), len(edges))
    index = head + sizes.tobytes() + begins.astype("<i8").tobytes() + edges.tobytes()
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(b"".join(row.tobytes() for row in rows))
    return Path(f"{prefix}.idx")


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_megatrons_pair_holds_every_document(place: Path, tmp_path: Path, split: str) -> None:
    """A sequence a document, read back by hand; and importing it gives the same shards."""
    made = export_dataset(place / "shards", out=tmp_path / "out", target="megatron", split=split)
    expected = documents_of(place / "shards", split)
    assert read_pair(tmp_path / "out") == [[one] for one in expected]
    assert (made.documents, made.tokens) == (len(expected), sum(map(len, expected)))
    import_dataset(tmp_path / "out", tokenizer=place / "tokenizer.json", out=tmp_path / "back")
    assert documents_of(tmp_path / "back") == expected
    assert verify(tmp_path / "back").ok
    stream = TokenStream(tmp_path / "back", sequence_length=16, batch_size=2)
    assert next(stream)["tokens"].shape == (2, 16)


@settings(max_examples=50, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 120), max_size=5), max_size=3), min_size=1, max_size=6
    ),
    code=st.sampled_from([1, 2, 3, 4, 5, 8]),
)
def test_documents_end_in_the_end_of_text(
    place: Path,
    documents: list[list[list[int]]],
    code: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """For every type of token, sequences are joined, ends are added, and inner ones cut."""
    folder = tmp_path_factory.mktemp("pair")
    path = write_pair(folder / "x", documents, code)
    end = Tokenizer.load(place / "tokenizer.json").end_of_text
    expected: list[list[int]] = []
    for document in documents:
        rest = [token for row in document for token in row]
        while rest:
            size = rest.index(end) + 1 if end in rest else len(rest)
            expected.append(rest[:size] if rest[size - 1] == end else [*rest[:size], end])
            rest = rest[size:]
    if not expected:
        with pytest.raises(CorpusError, match="empty"):
            import_dataset(path, tokenizer=place / "tokenizer.json", out=folder / "out")
        return
    import_dataset(path, tokenizer=place / "tokenizer.json", out=folder / "out")
    assert documents_of(folder / "out") == expected


def test_a_damaged_index_of_megatrons_is_named(place: Path, tmp_path: Path) -> None:
    """Every cut, and values that lead outside the tokens; nothing is left where OUT was to be."""
    path = write_pair(tmp_path / "x", [[[5, 6], [7]], [[8]]])
    whole = path.read_bytes()
    damaged: list[bytes] = [whole[:size] for size in range(len(whole))]
    for at, value in ((9, 2), (17, 6), (17, 9), (18, 1 << 40), (34, -5), (46, 1 << 30), (70, 9)):
        form = "<Q" if value > 0 else "<i"
        packed = bytes([value]) if at == 17 else struct.pack(form, value)
        damaged.append(whole[:at] + packed + whole[at + len(packed) :])
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(CorpusError, match=r"x\.idx"):
            import_dataset(path, tokenizer=place / "tokenizer.json", out=tmp_path / "out")
    path.write_bytes(whole)
    (tmp_path / "x.bin").unlink()
    with pytest.raises(CorpusError, match=r"x\.bin cannot be read"):
        import_dataset(path, tokenizer=place / "tokenizer.json", out=tmp_path / "out")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["x.idx"]


@pytest.mark.parametrize("token", [300, -1])
def test_a_token_that_the_tokenizer_lacks_is_named(place: Path, tmp_path: Path, token: int) -> None:
    """With its document."""
    path = write_pair(tmp_path / "x", [[[5]], [[7, token]]])
    with pytest.raises(CorpusError, match=f"document 1 of .* has the token {token}"):
        import_dataset(path, tokenizer=place / "tokenizer.json", out=tmp_path / "out")


def write_mds(
    folder: Path,
    rows: list[dict[str, bytes]],
    columns: dict[str, tuple[str, int | None]],
    pack: tuple[str, Callable[[bytes], bytes]] | None = None,
) -> Path:
    """A folder of MDS with two shards, as MDSWriter lays it out."""
    folder.mkdir()
    shards: list[dict[str, Any]] = []
    half = len(rows) // 2
    for number, part in enumerate((rows[:half], rows[half:])):
        cells = []
        for row in part:
            sizes = [len(row[name]) for name, (_, size) in columns.items() if size is None]
            cells.append(np.array(sizes, "<u4").tobytes() + b"".join(row[name] for name in columns))
        header = json.dumps({"format": "mds"}).encode()
        first = 4 * (len(part) + 2) + len(header)
        bounds = np.cumsum([first, *map(len, cells)]).astype("<u4")
        content = struct.pack("<I", len(part)) + bounds.tobytes() + header + b"".join(cells)
        name = f"shard.{number:05d}.mds"

        def facts(name: str, content: bytes) -> dict[str, Any]:
            hashes = {"sha1": hashlib.sha1(content).hexdigest()}
            return {"basename": name, "bytes": len(content), "hashes": hashes}

        shard: dict[str, Any] = {
            "column_names": list(columns),
            "column_encodings": [encoding for encoding, _ in columns.values()],
            "column_sizes": [size for _, size in columns.values()],
            "compression": pack[0] if pack else None,
            "format": "mds",
            "hashes": ["sha1"],
            "raw_data": facts(name, content),
            "samples": len(part),
            "size_limit": 1 << 26,
            "version": 2,
            "zip_data": None,
        }
        if pack:
            packed = pack[1](content)
            shard["zip_data"] = facts(f"{name}.{pack[0]}", packed)
            name, content = f"{name}.{pack[0]}", packed
        (folder / name).write_bytes(content)
        shards.append(shard)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


PACKINGS: list[tuple[str, Callable[[bytes], bytes]] | None] = [
    None,
    ("zstd", zstandard.ZstdCompressor().compress),
    ("gz", gzip.compress),
]


@pytest.mark.parametrize("pack", PACKINGS, ids=["plain", "zstd", "gzip"])
def test_texts_of_mds_are_tokenized(place: Path, tmp_path: Path, pack: Any) -> None:
    """Beside another column, plain and packed: the documents of a build from the same texts."""
    texts = texts_of(5, 30)
    rows = [{"id": b"12345678", "text": text.encode()} for text in texts]
    columns: dict[str, tuple[str, int | None]] = {"id": ("int", 8), "text": ("str", None)}
    folder = write_mds(tmp_path / "mds", rows, columns, pack)
    import_dataset(folder, tokenizer=place / "tokenizer.json", out=tmp_path / "out")
    found = documents_in(tmp_path / "out", Tokenizer.load(tmp_path / "out"))
    assert found == texts


@pytest.mark.parametrize(
    ("encoding", "size", "kind"),
    [("bytes", None, "<i8"), ("ndarray:uint16:4", 8, "<u2"), ("ndarray:int32:4", 16, "<i4")],
)
def test_tokens_of_mds_are_taken_as_they_are(
    place: Path, tmp_path: Path, encoding: str, size: int | None, kind: str
) -> None:
    """Each row a document, whatever holds its tokens."""
    tokens = [[n + 1, 5, n % 7 + 1, 0] for n in range(20)]
    rows = [{"tokens": np.array(row, kind).tobytes()} for row in tokens]
    folder = write_mds(tmp_path / "mds", rows, {"tokens": (encoding, size)})
    import_dataset(
        folder, tokenizer=place / "tokenizer.json", out=tmp_path / "out", column="tokens"
    )
    assert documents_of(tmp_path / "out") == tokens


def test_damaged_and_hostile_mds_is_named(place: Path, tmp_path: Path) -> None:
    """Flipped bytes, names that lead elsewhere, unknown columns and packings."""
    rows = [{"text": text.encode()} for text in texts_of(5, 10)]
    folder = write_mds(tmp_path / "mds", rows, {"text": ("str", None)})
    index, shard = folder / "index.json", folder / "shard.00001.mds"
    whole, content = index.read_text(), shard.read_bytes()

    def load(column: str = "text") -> None:
        out = tmp_path / "out"
        import_dataset(folder, tokenizer=place / "tokenizer.json", out=out, column=column)

    for at in range(0, len(content), 97):
        shard.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(CorpusError, match="sha1"):
            load()
    index.write_text(whole.replace('"sha1": "', '"none": "'))
    for at in range(4 * 7):  # the head, with no hash that is known
        shard.write_bytes(content[:at] + bytes([content[at] ^ 0x80]) + content[at + 1 :])
        with pytest.raises(CorpusError):
            load()
    for old, new, why in (
        ("shard.00001.mds", "../x", "not a plain file name"),
        ('"str"', '"pil"', "is encoded as 'pil'"),
        ('"format": "mds"', '"format": "json"', "not mds"),
        ('"samples": 5', '"samples": 6', "has 5 rows, not 6"),
        ('"column_sizes": [null]', '"column_sizes": [-4]', "too short"),
    ):
        shard.write_bytes(content)
        index.write_text(whole.replace(old, new))
        with pytest.raises(CorpusError, match=why):
            load()
    index.write_text(whole)
    with pytest.raises(CorpusError, match="has no column 'tokens'; use one of 'text'"):
        load("tokens")
    load()


def test_a_bomb_of_mds_is_not_unpacked(place: Path, tmp_path: Path) -> None:
    """A packed shard that is larger than the index says."""
    rows = [{"text": b"a b c"}] * 4
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (1 << 24))
    folder = write_mds(tmp_path / "mds", rows, {"text": ("str", None)}, ("zstd", lambda _: bomb))
    with pytest.raises(CorpusError, match=r"has .* bytes, not"):
        import_dataset(folder, tokenizer=place / "tokenizer.json", out=tmp_path / "out")


def test_parquet_holds_text_and_tokens(place: Path, tmp_path: Path) -> None:
    """And a build from it gives the shards it was made of."""
    export_dataset(place / "shards", out=tmp_path / "a.parquet", target="parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    expected = documents_of(place / "shards")
    assert table["tokens"].to_pylist() == expected
    tokenizer = Tokenizer.load(place / "tokenizer.json")
    assert table["text"].to_pylist() == [tokenizer.decode(one) for one in expected]
    build(tmp_path / "a.parquet", tokenizer=tokenizer, out=tmp_path / "again")
    assert documents_of(tmp_path / "again") == expected


def test_what_stands_is_not_written_over(place: Path, tmp_path: Path) -> None:
    """Neither by an export nor by an import; and a target that there is not is refused."""
    (tmp_path / "a.idx").write_text("mine")
    with pytest.raises(OutputError, match=r"a\.idx exists"):
        export_dataset(place / "shards", out=tmp_path / "a", target="megatron")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    path = write_pair(tmp_path / "x", [[[5]]])
    with pytest.raises(OutputError, match="not empty"):
        import_dataset(path, tokenizer=place / "tokenizer.json", out=tmp_path / "full")
    with pytest.raises(SettingError, match="megatron or parquet"):
        export_dataset(place / "shards", out=tmp_path / "b", target="mds")  # type: ignore[arg-type]


def test_the_commands_import_and_export(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There and back from a shell; bad input is one line and exit 2."""
    pair, back = str(tmp_path / "pair"), str(tmp_path / "back")
    shards, tokenizer = str(place / "shards"), str(place / "tokenizer.json")
    assert main(["export", shards, "--format", "megatron", "--out", pair]) == 0
    assert main(["import", f"{pair}.idx", "--tokenizer", tokenizer, "--out", back]) == 0
    assert documents_of(tmp_path / "back") == documents_of(place / "shards")
    assert "documents" in capsys.readouterr().out
    assert main(["import", f"{pair}.no", "--tokenizer", tokenizer, "--out", pair]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_export_may_stand_beside_what_has_its_name(place: Path, tmp_path: Path) -> None:
    """A pair beside a file or folder named as its prefix; Parquet in the place of neither."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder"):
        export_dataset(place / "shards", out=tmp_path / name, target="megatron")
        assert (tmp_path / f"{name}.idx").stat().st_size
    with pytest.raises(OutputError, match="file exists; use another name"):
        export_dataset(place / "shards", out=tmp_path / "file", target="parquet")
    with pytest.raises(OutputError, match="which is a folder, but a file will be written"):
        export_dataset(place / "shards", out=tmp_path / "folder", target="parquet")


def test_half_a_pair_of_a_killed_export_is_gone_on_from(place: Path, tmp_path: Path) -> None:
    """The tokens of another are not: only where the index lies aside are they our own."""
    (tmp_path / "a.bin").write_text("mine")
    with pytest.raises(OutputError, match=r"a\.bin exists"):
        export_dataset(place / "shards", out=tmp_path / "a", target="megatron")
    (tmp_path / "a.idx.partial").touch()
    export_dataset(place / "shards", out=tmp_path / "a", target="megatron")
    assert read_pair(tmp_path / "a") == [[one] for one in documents_of(place / "shards")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
