"""Datasets of other libraries are imported and exported without losing a token or document."""

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

from .test_build import decode_split, random_texts, write_lines


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with 300 tokens and shards of forty documents."""
    folder = tmp_path_factory.mktemp("place")
    lines = write_lines(folder / "a.jsonl", random_texts(3, 40))
    train_tokenizer(lines, vocab_size=300, out=folder / "tokenizer.json")
    build(lines, tokenizer=folder / "tokenizer.json", out=folder / "shards", held_out_fraction=0.2)
    return folder


def read_documents(folder: Path, split: str = "train") -> list[list[int]]:
    """Return the tokens of each document, including its end of text."""
    reader = Split(folder, split)
    parts = np.split(reader.read(0, reader.tokens), reader.all_ends())
    return [part.tolist() for part in parts[:-1]]


def read_pair(prefix: Path) -> list[list[list[int]]]:
    """Read a Megatron file pair value by value, as documents of sequences."""
    content, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert content[:9] == b"MMIDIDX\0\0"
    version, code, sequences, bounds = struct.unpack_from("<QBQQ", content, 9)
    assert version == 1
    letter, size = {8: ("H", 2), 4: ("i", 4)}[code]
    lengths = struct.unpack_from(f"<{sequences}i", content, 34)
    offsets = struct.unpack_from(f"<{sequences}q", content, 34 + 4 * sequences)
    edges = struct.unpack_from(f"<{bounds}q", content, 34 + 12 * sequences)
    assert len(content) == 34 + 12 * sequences + 8 * bounds
    assert len(tokens) == size * sum(lengths)
    rows = [
        list(struct.unpack_from(f"<{length}{letter}", tokens, offset))
        for length, offset in zip(lengths, offsets, strict=True)
    ]
    return [rows[first:last] for first, last in pairwise(edges)]


def write_pair(prefix: Path, documents: list[list[list[int]]], code: int = 4) -> Path:
    """Write documents of sequences as Megatron's builder does."""
    dtype = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}[code]
    rows = [np.array(row, dtype) for document in documents for row in document]
    sizes = np.array([len(row) for row in rows], "<i4")
    offsets = (np.cumsum(sizes, dtype="<i8") - sizes) * np.dtype(dtype).itemsize
    edges = np.cumsum([0, *map(len, documents)], dtype="<i8")
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(rows), len(edges))
    index = header + sizes.tobytes() + offsets.astype("<i8").tobytes() + edges.tobytes()
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(b"".join(row.tobytes() for row in rows))
    return Path(f"{prefix}.idx")


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_megatron_export_holds_every_document_and_imports_back(
    workspace: Path, tmp_path: Path, split: str
) -> None:
    """One sequence per document."""
    summary = export_dataset(
        workspace / "shards", out=tmp_path / "out", target="megatron", split=split
    )
    expected = read_documents(workspace / "shards", split)
    assert read_pair(tmp_path / "out") == [[document] for document in expected]
    assert (summary.documents, summary.tokens) == (len(expected), sum(map(len, expected)))
    import_dataset(tmp_path / "out", tokenizer=workspace / "tokenizer.json", out=tmp_path / "back")
    assert read_documents(tmp_path / "back") == expected
    assert verify(tmp_path / "back").ok
    stream = TokenStream(tmp_path / "back", sequence_length=16, batch_size=2)
    assert next(stream)["tokens"].shape == (2, 16)


def test_a_pair_whose_names_are_in_capitals_is_imported(workspace: Path, tmp_path: Path) -> None:
    """Either file, or the prefix alone for names in small letters."""
    path = write_pair(tmp_path / "x", [[[1, 2, 3]], [[4]]])
    for file in (path, path.with_suffix(".bin")):
        file.rename(file.with_name(file.name.upper()))
    for number, name in enumerate(("X.IDX", "X.BIN")):
        out = tmp_path / f"{number}"
        import_dataset(tmp_path / name, tokenizer=workspace / "tokenizer.json", out=out)
        assert [row[:-1] for row in read_documents(out)] == [[1, 2, 3], [4]]


@settings(max_examples=50, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 120), max_size=5), max_size=3), min_size=1, max_size=6
    ),
    code=st.sampled_from([1, 2, 3, 4, 5, 8]),
)
def test_imported_megatron_documents_end_in_end_of_text(
    workspace: Path,
    documents: list[list[list[int]]],
    code: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """For every token type: sequences are joined, ends added, documents split at inner ends."""
    folder = tmp_path_factory.mktemp("pair")
    path = write_pair(folder / "x", documents, code)
    end = Tokenizer.load(workspace / "tokenizer.json").end_of_text
    expected: list[list[int]] = []
    for document in documents:
        remaining = [token for row in document for token in row]
        while remaining:
            size = remaining.index(end) + 1 if end in remaining else len(remaining)
            expected.append(
                remaining[:size] if remaining[size - 1] == end else [*remaining[:size], end]
            )
            remaining = remaining[size:]
    if not expected:
        with pytest.raises(CorpusError, match="empty"):
            import_dataset(path, tokenizer=workspace / "tokenizer.json", out=folder / "out")
        return
    import_dataset(path, tokenizer=workspace / "tokenizer.json", out=folder / "out")
    assert read_documents(folder / "out") == expected


def test_a_damaged_megatron_index_is_refused_by_name(workspace: Path, tmp_path: Path) -> None:
    """Every truncation, and values that point outside the tokens; no output is left."""
    path = write_pair(tmp_path / "x", [[[5, 6], [7]], [[8]]])
    original = path.read_bytes()
    damaged: list[bytes] = [original[:size] for size in range(len(original))]
    for offset, value in (
        (9, 2),
        (17, 6),
        (17, 9),
        (18, 1 << 40),
        (34, -5),
        (46, 1 << 30),
        (70, 9),
    ):
        layout = "<Q" if value > 0 else "<i"
        packed = bytes([value]) if offset == 17 else struct.pack(layout, value)
        damaged.append(original[:offset] + packed + original[offset + len(packed) :])
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(CorpusError, match=r"x\.idx"):
            import_dataset(path, tokenizer=workspace / "tokenizer.json", out=tmp_path / "out")
    path.write_bytes(original)
    (tmp_path / "x.bin").unlink()
    with pytest.raises(CorpusError, match=r"x\.bin cannot be read"):
        import_dataset(path, tokenizer=workspace / "tokenizer.json", out=tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x.idx"]


@pytest.mark.parametrize("token", [300, -1])
def test_tokens_outside_the_vocabulary_are_refused_with_their_document(
    workspace: Path, tmp_path: Path, token: int
) -> None:
    path = write_pair(tmp_path / "x", [[[5]], [[7, token]]])
    with pytest.raises(CorpusError, match=f"document 1 of .* has the token {token}"):
        import_dataset(path, tokenizer=workspace / "tokenizer.json", out=tmp_path / "out")


def write_mds(
    folder: Path,
    rows: list[dict[str, bytes]],
    columns: dict[str, tuple[str, int | None]],
    compression: tuple[str, Callable[[bytes], bytes]] | None = None,
) -> Path:
    """Write an MDS folder of two shards as MDSWriter does."""
    folder.mkdir()
    shards: list[dict[str, Any]] = []
    half = len(rows) // 2
    for number, part in enumerate((rows[:half], rows[half:])):
        cells = []
        for row in part:
            sizes = [len(row[name]) for name, (_, size) in columns.items() if size is None]
            cells.append(np.array(sizes, "<u4").tobytes() + b"".join(row[name] for name in columns))
        header = json.dumps({"format": "mds"}).encode()
        data_start = 4 * (len(part) + 2) + len(header)
        bounds = np.cumsum([data_start, *map(len, cells)]).astype("<u4")
        content = struct.pack("<I", len(part)) + bounds.tobytes() + header + b"".join(cells)
        name = f"shard.{number:05d}.mds"

        def describe(name: str, content: bytes) -> dict[str, Any]:
            hashes = {"sha1": hashlib.sha1(content).hexdigest()}
            return {"basename": name, "bytes": len(content), "hashes": hashes}

        shard: dict[str, Any] = {
            "column_names": list(columns),
            "column_encodings": [encoding for encoding, _ in columns.values()],
            "column_sizes": [size for _, size in columns.values()],
            "compression": compression[0] if compression else None,
            "format": "mds",
            "hashes": ["sha1"],
            "raw_data": describe(name, content),
            "samples": len(part),
            "size_limit": 1 << 26,
            "version": 2,
            "zip_data": None,
        }
        if compression:
            compressed = compression[1](content)
            shard["zip_data"] = describe(f"{name}.{compression[0]}", compressed)
            name, content = f"{name}.{compression[0]}", compressed
        (folder / name).write_bytes(content)
        shards.append(shard)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


COMPRESSIONS: list[tuple[str, Callable[[bytes], bytes]] | None] = [
    None,
    ("zstd", zstandard.ZstdCompressor().compress),
    ("gz", gzip.compress),
]


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=["plain", "zstd", "gzip"])
def test_texts_of_mds_are_tokenized(workspace: Path, tmp_path: Path, compression: Any) -> None:
    """A build from the same texts gives the same documents."""
    texts = random_texts(5, 30)
    rows = [{"id": b"12345678", "text": text.encode()} for text in texts]
    columns: dict[str, tuple[str, int | None]] = {"id": ("int", 8), "text": ("str", None)}
    folder = write_mds(tmp_path / "mds", rows, columns, compression)
    import_dataset(folder, tokenizer=workspace / "tokenizer.json", out=tmp_path / "out")
    actual = decode_split(tmp_path / "out", Tokenizer.load(tmp_path / "out"))
    assert actual == texts


@pytest.mark.parametrize(
    ("encoding", "size", "dtype"),
    [("bytes", None, "<i8"), ("ndarray:uint16:4", 8, "<u2"), ("ndarray:int32:4", 16, "<i4")],
)
def test_mds_token_columns_are_imported_unchanged(
    workspace: Path, tmp_path: Path, encoding: str, size: int | None, dtype: str
) -> None:
    """One document per row."""
    tokens = [[n + 1, 5, n % 7 + 1, 0] for n in range(20)]
    rows = [{"tokens": np.array(row, dtype).tobytes()} for row in tokens]
    folder = write_mds(tmp_path / "mds", rows, {"tokens": (encoding, size)})
    import_dataset(
        folder, tokenizer=workspace / "tokenizer.json", out=tmp_path / "out", column="tokens"
    )
    assert read_documents(tmp_path / "out") == tokens


def test_damaged_and_hostile_mds_is_refused(workspace: Path, tmp_path: Path) -> None:
    """Flipped bytes, names outside the folder, unknown columns and encodings."""
    rows = [{"text": text.encode()} for text in random_texts(5, 10)]
    folder = write_mds(tmp_path / "mds", rows, {"text": ("str", None)})
    index, shard = folder / "index.json", folder / "shard.00001.mds"
    original, content = index.read_text(), shard.read_bytes()

    def run_import(column: str = "text") -> None:
        out = tmp_path / "out"
        import_dataset(folder, tokenizer=workspace / "tokenizer.json", out=out, column=column)

    for offset in range(0, len(content), 97):
        shard.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        with pytest.raises(CorpusError, match="sha1"):
            run_import()
    index.write_text(original.replace('"sha1": "', '"none": "'))
    for offset in range(4 * 7):  # the header, without a known hash
        shard.write_bytes(
            content[:offset] + bytes([content[offset] ^ 0x80]) + content[offset + 1 :]
        )
        with pytest.raises(CorpusError):
            run_import()
    for old, new, message in (
        ("shard.00001.mds", "../x", "not a plain file name"),
        ('"str"', '"pil"', "is encoded as 'pil'"),
        ('"format": "mds"', '"format": "json"', "not mds"),
        ('"samples": 5', '"samples": 6', "has 5 rows, not 6"),
        ('"column_sizes": [null]', '"column_sizes": [-4]', "too short"),
    ):
        shard.write_bytes(content)
        index.write_text(original.replace(old, new))
        with pytest.raises(CorpusError, match=message):
            run_import()
    index.write_text(original)
    with pytest.raises(CorpusError, match="has no column 'tokens'; use one of 'text'"):
        run_import("tokens")
    run_import()


def test_an_mds_shard_larger_than_its_index_entry_is_refused(
    workspace: Path, tmp_path: Path
) -> None:
    """A decompression bomb."""
    rows = [{"text": b"a b c"}] * 4
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (1 << 24))
    folder = write_mds(tmp_path / "mds", rows, {"text": ("str", None)}, ("zstd", lambda _: bomb))
    with pytest.raises(CorpusError, match=r"has .* bytes, not"):
        import_dataset(folder, tokenizer=workspace / "tokenizer.json", out=tmp_path / "out")


def test_parquet_export_holds_text_and_tokens(workspace: Path, tmp_path: Path) -> None:
    """Building from it gives the same documents."""
    export_dataset(workspace / "shards", out=tmp_path / "a.parquet", target="parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    expected = read_documents(workspace / "shards")
    assert table["tokens"].to_pylist() == expected
    tokenizer = Tokenizer.load(workspace / "tokenizer.json")
    assert table["text"].to_pylist() == [tokenizer.decode(document) for document in expected]
    build(tmp_path / "a.parquet", tokenizer=tokenizer, out=tmp_path / "rebuilt")
    assert read_documents(tmp_path / "rebuilt") == expected


def test_existing_files_are_never_overwritten(workspace: Path, tmp_path: Path) -> None:
    """By an export or an import; unknown targets are refused."""
    (tmp_path / "a.idx").write_text("mine")
    with pytest.raises(OutputError, match=r"a\.idx exists"):
        export_dataset(workspace / "shards", out=tmp_path / "a", target="megatron")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    path = write_pair(tmp_path / "x", [[[5]]])
    with pytest.raises(OutputError, match="not empty"):
        import_dataset(path, tokenizer=workspace / "tokenizer.json", out=tmp_path / "full")
    with pytest.raises(SettingError, match="megatron, parquet or datasets"):
        export_dataset(workspace / "shards", out=tmp_path / "b", target="mds")  # type: ignore[arg-type]


def test_the_commands_import_and_export(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad input is one line and exit 2."""
    pair, back = str(tmp_path / "pair"), str(tmp_path / "back")
    shards, tokenizer = str(workspace / "shards"), str(workspace / "tokenizer.json")
    assert main(["export", shards, "--format", "megatron", "--out", pair]) == 0
    assert main(["import", f"{pair}.idx", "--tokenizer", tokenizer, "--out", back]) == 0
    assert read_documents(tmp_path / "back") == read_documents(workspace / "shards")
    assert "documents" in capsys.readouterr().out
    assert main(["import", f"{pair}.no", "--tokenizer", tokenizer, "--out", pair]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_megatron_export_may_share_its_prefix_with_an_existing_file_or_folder(
    workspace: Path, tmp_path: Path
) -> None:
    """Parquet needs the name itself."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder"):
        export_dataset(workspace / "shards", out=tmp_path / name, target="megatron")
        assert (tmp_path / f"{name}.idx").stat().st_size
    with pytest.raises(OutputError, match="file exists; use another name"):
        export_dataset(workspace / "shards", out=tmp_path / "file", target="parquet")
    with pytest.raises(OutputError, match="which is a folder, but a file will be written"):
        export_dataset(workspace / "shards", out=tmp_path / "folder", target="parquet")


def test_an_interrupted_megatron_export_resumes(workspace: Path, tmp_path: Path) -> None:
    """An existing .bin is only ours if the partial index is there."""
    (tmp_path / "a.bin").write_text("mine")
    with pytest.raises(OutputError, match=r"a\.bin exists"):
        export_dataset(workspace / "shards", out=tmp_path / "a", target="megatron")
    (tmp_path / "a.idx.partial").touch()
    export_dataset(workspace / "shards", out=tmp_path / "a", target="megatron")
    assert read_pair(tmp_path / "a") == [
        [document] for document in read_documents(workspace / "shards")
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
