"""Any damage to a dataset is detected and named, and never read as data."""

import random
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
import zstandard

from ms_data import (
    CorpusError,
    DamageError,
    DataError,
    DedupOptions,
    TokenStream,
    clean,
    dedup,
    verify,
)
from ms_data.corpus.find import find_corpus
from ms_data.disk.format import (
    FRAME,
    MAGIC,
    TRAILER,
    TRAILER_MARK,
    Footer,
    Index,
    ShardEntry,
    checksum,
    encode_index,
)
from ms_data.disk.split import read_index
from ms_data.ledger.entries import read_ledger
from ms_data.ledger.record import read_record

from .reference_samples import random_documents, write_dataset
from .test_build import random_texts, write_lines

FAULTS = 1000
PARTS = ("frame", "head", "footer", "trailer", "file", "index")


@pytest.fixture
def copy(dataset: Path, tmp_path: Path) -> Path:
    """A copy of the dataset to damage."""
    return Path(shutil.copytree(dataset, tmp_path / "copy"))


def shard_entry(folder: Path, number: int = 0) -> ShardEntry:
    """Return the index entry of one shard."""
    return read_index(folder).shards[number]


def part_at(folder: Path, name: str, offset: int) -> str:
    """Return the part of a shard that holds an offset, from the file layout."""
    content = (folder / name).read_bytes()
    _, size, _ = TRAILER.unpack(content[-TRAILER.size :])
    footer_at = len(content) - TRAILER.size - size
    footer = msgspec.msgpack.decode(content[footer_at : footer_at + size], type=Footer)
    table_at = footer_at - footer.frames * FRAME.itemsize
    table = np.frombuffer(content[table_at:footer_at], FRAME)
    edges = [(len(MAGIC), "head")]
    for number, frame_bytes in enumerate(table["size"].tolist()):
        edges.append((edges[-1][0] + frame_bytes, f"frame {number}"))
    edges += [(table_at + len(table) * FRAME.itemsize, "frame table"), (footer_at + size, "footer")]
    return next((part for edge, part in edges if offset < edge), "trailer")


def test_an_untouched_dataset_has_no_faults(dataset: Path) -> None:
    report = verify(dataset)
    assert report.ok
    assert report.frames > 40
    assert report.shards == 6


def test_a_thousand_random_flips_and_truncations_are_all_detected(copy: Path) -> None:
    """Each is reported under its file, and under its frame if it hits one."""
    (copy / "tokenizer.json").unlink()
    names = sorted(path.name for path in copy.iterdir())
    rng = random.Random(20261121)
    for _ in range(FAULTS):
        name = rng.choice(names)
        path = copy / name
        content = path.read_bytes()
        offset = rng.randrange(len(content))
        cut = rng.random() < 0.3
        part = part_at(copy, name, offset) if name.endswith(".msd") else "index"
        if cut:
            path.write_bytes(content[:offset])
        else:
            flipped = content[offset] ^ (1 << rng.randrange(8))
            path.write_bytes(content[:offset] + bytes([flipped]) + content[offset + 1 :])
        faults = [fault for fault in verify(copy).faults if fault.file != "tokenizer.json"]
        assert [fault.file for fault in faults] == [name], (name, offset, cut, faults)
        reported_part = faults[0].part
        if part.startswith("frame ") and part != "frame table":
            assert reported_part == part, (name, offset, cut, faults)
        assert reported_part.split()[0] in PARTS
        path.write_bytes(content)
    assert [fault.file for fault in verify(copy).faults] == ["tokenizer.json"]


def test_every_flipped_byte_and_every_truncation_is_detected(tmp_path: Path) -> None:
    """Exhaustive over one shard and its index."""
    folder = write_dataset(tmp_path / "tiny", random_documents(0, 4, 30), documents_per_shard=4)
    for path in (folder / "shard-00000.msd", folder / "index.json"):
        content = path.read_bytes()
        for offset in range(len(content)):
            flipped = bytearray(content)
            flipped[offset] ^= 1 << (offset % 8)
            for damaged in (bytes(flipped), content[:offset]):
                path.write_bytes(damaged)
                assert path.name in {fault.file for fault in verify(folder).faults}, offset
        path.write_bytes(content)
    assert verify(folder).ok


def test_a_changed_tokenizer_is_detected(copy: Path) -> None:
    (copy / "tokenizer.json").write_bytes(b" ")
    assert [fault.file for fault in verify(copy).faults] == ["tokenizer.json"]


def test_verify_continues_after_a_damaged_frame(copy: Path) -> None:
    path = copy / "shard-00002.msd"
    content = bytearray(path.read_bytes())
    content[len(MAGIC) + 1] ^= 1
    other_offset = next(
        offset for offset in range(len(content)) if part_at(copy, path.name, offset) == "frame 3"
    )
    content[other_offset] ^= 1
    path.write_bytes(content)
    assert [fault.part for fault in verify(copy).faults] == ["frame 0", "frame 3"]


@pytest.mark.parametrize("change", ["missing", "longer", "swapped"])
def test_missing_lengthened_and_swapped_shards_are_detected(copy: Path, change: str) -> None:
    first, second = copy / "shard-00000.msd", copy / "shard-00001.msd"
    if change == "missing":
        first.unlink()
    elif change == "longer":
        first.write_bytes(first.read_bytes() + b"\0")
    else:
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
    assert "shard-00000.msd" in {fault.file for fault in verify(copy).faults}


def test_a_stream_raises_when_it_meets_a_damaged_frame(copy: Path) -> None:
    """The error names file and frame."""
    path = copy / "shard-00003.msd"
    content = path.read_bytes()
    offsets = [at for at in range(len(content)) if part_at(copy, path.name, at) == "frame 2"]
    for offset in offsets[::7]:
        changed = bytearray(content)
        changed[offset] ^= 0x10
        path.write_bytes(changed)
        stream = TokenStream(copy, sequence_length=8, batch_size=1, epochs=1)
        with pytest.raises(DamageError, match=r"shard-00003\.msd: frame 2: "):
            list(stream)


def test_a_stream_can_return_to_the_window_before_the_damage(copy: Path) -> None:
    stream = TokenStream(
        copy, sequence_length=8, batch_size=1, shuffle=False, chunk_samples=2, window_chunks=8
    )
    first = next(stream)["tokens"].tolist()
    start_state = stream.state_dict() | {"consumed_samples": 0}
    path = copy / "shard-00001.msd"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamageError):
        list(islice(stream, 500))
    stream.load_state_dict(start_state)
    assert next(stream)["tokens"].tolist() == first


def test_a_stream_raises_when_a_shard_shrinks_while_open(copy: Path) -> None:
    """An error instead of a crash of the process."""
    stream = TokenStream(
        copy, sequence_length=8, batch_size=1, shuffle=False, chunk_samples=1, window_chunks=1
    )
    next(stream)
    path = copy / "shard-00000.msd"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DamageError, match=r"shard-00000\.msd"):
        list(islice(stream, 20))


@pytest.mark.parametrize("name", ["../shard-00000.msd", "/etc/passwd", "shard-00000.msd/../x", ""])
def test_an_index_cannot_name_a_file_outside_its_folder(copy: Path, name: str) -> None:
    """Even with a valid fingerprint."""
    index = msgspec.json.decode((copy / "index.json").read_bytes())
    index["shards"][0]["name"] = name
    write_signed(copy, index)
    with pytest.raises(DamageError, match="name"):
        TokenStream(copy, sequence_length=8, batch_size=1)


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("frame_tokens", 1 << 40),
        ("frame_tokens", 0),
        ("vocabulary_size", 1 << 17),
        ("end_of_text", 500),
        ("shards", []),
        ("surplus", 1),
    ],
)
def test_an_index_with_invalid_values_is_refused(copy: Path, member: str, value: object) -> None:
    """Even with a valid fingerprint."""
    index = msgspec.json.decode((copy / "index.json").read_bytes())
    index[member] = value
    write_signed(copy, index)
    with pytest.raises(DamageError, match=r"index\.json"):
        read_index(copy)


def write_signed(folder: Path, index: dict[str, object]) -> None:
    """Write an index with a valid fingerprint."""

    def serialize(value: dict[str, object]) -> bytes:
        return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"

    index["fingerprint"] = ""
    index["fingerprint"] = xxhash.xxh3_128_hexdigest(serialize(index))
    (folder / "index.json").write_bytes(serialize(index))


def forge(folder: Path, payload: bytes, *, size: int | None = None) -> None:
    """Replace the dataset with one shard that has valid checksums and `payload` as its frame."""
    index = read_index(folder)
    record = (len(payload) if size is None else size, 1, 0, checksum(payload))
    table = np.array([record], FRAME).tobytes()
    footer = msgspec.msgpack.encode(
        Footer(
            token_type="uint16",
            frame_tokens=index.frame_tokens,
            tokens=16,
            documents=1,
            table_checksum=checksum(table),
        )
    )
    trailer = TRAILER.pack(checksum(footer), len(footer), TRAILER_MARK)
    content = MAGIC + payload + table + footer + trailer
    (folder / "shard-00000.msd").write_bytes(content)
    entry = ShardEntry(
        name="shard-00000.msd",
        split="train",
        size_bytes=len(content),
        tokens=16,
        documents=1,
        footer_checksum=checksum(footer),
    )
    forged = msgspec.structs.replace(index, shards=(entry,))
    (folder / "index.json").write_bytes(encode_index(forged))


def test_a_frame_that_would_decompress_to_another_size_is_refused(copy: Path) -> None:
    """The size in the zstd header is compared with the frame table before decompressing."""
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    forge(copy, bomb)
    assert len(bomb) < 100_000
    with pytest.raises(DamageError, match="its size does not match the frame table"):
        next(TokenStream(copy, sequence_length=8, batch_size=1))


def test_a_frame_larger_than_its_file_is_refused_before_reading(copy: Path) -> None:
    """Frame sizes must add up to the file size."""
    forge(copy, b"x" * 10, size=1 << 31)
    with pytest.raises(DamageError, match="does not match the frames"):
        next(TokenStream(copy, sequence_length=8, batch_size=1))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([*range(15), 600, 16], "outside the vocabulary"),
        ([*range(16), 16], "end-of-text token"),
        ([*range(15), 499, 17], "out of order"),
        ([*range(15), 499, 0], "out of order"),
    ],
)
def test_impossible_content_with_valid_checksums_is_reported(
    copy: Path, values: list[int], problem: str
) -> None:
    forge(copy, zstandard.ZstdCompressor().compress(np.array(values, "<u2").tobytes()))
    (fault,) = verify(copy).faults
    assert fault.part == "frame 0"
    assert problem in fault.problem


def test_a_footer_with_impossible_totals_cannot_be_built() -> None:
    for change in ({"tokens": 0}, {"documents": 9}, {"frame_tokens": 1 << 20}):
        values = {"frame_tokens": 4, "tokens": 8, "documents": 2, "table_checksum": 0} | change
        with pytest.raises(ValueError, match=next(iter(change))):
            Footer(token_type="uint16", **values)  # type: ignore[arg-type]


def test_the_fingerprint_depends_only_on_the_content(tmp_path: Path) -> None:
    documents = random_documents(3, 10, 30)
    one = read_index(write_dataset(tmp_path / "one", documents))
    two = read_index(write_dataset(tmp_path / "two", documents))
    documents[4][0] = (documents[4][0] + 1) % 400 if len(documents[4]) > 1 else 499
    three = read_index(write_dataset(tmp_path / "three", documents))
    assert isinstance(one, Index)
    assert one.fingerprint == two.fingerprint != three.fingerprint


@pytest.mark.parametrize("sample_size", [40, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_a_flipped_bit_in_dedup_output_is_refused_or_harmless(
    sample_size: int, tmp_path: Path
) -> None:
    """Documents, ledger and record read as before, or raise."""
    texts = random_texts(1, 12, max_words=60)
    out = tmp_path / "out"
    options = DedupOptions(substring_words=3)
    dedup(write_lines(tmp_path / "a.jsonl", [*texts, *texts[:3]]), out=out, options=options)

    def read_all() -> list[Any]:
        ledger = read_ledger(out, read_record(out))
        return [*(document.text for document in find_corpus(out).documents()), *ledger]

    expected, rng, refused = read_all(), random.Random(sample_size), 0
    for path in (out / "documents/part-00000.jsonl.zst", out / "ledger/part-00000.jsonl.zst"):
        content = path.read_bytes()
        bits = range(8 * len(content))
        for bit in {*range(160), *rng.sample(bits, min(sample_size, len(bits)))}:
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            try:
                assert read_all() == expected, (path.name, bit)
            except DataError:
                refused += 1
        path.write_bytes(content)
    assert refused > 250


def test_a_flipped_bit_in_ledger_json_is_detected(tmp_path: Path) -> None:
    """The record holds settings and counts. Tries 400 single-bit flips."""
    out = tmp_path / "out"
    clean(write_lines(tmp_path / "a.jsonl", random_texts(1, 12)), {"unicode": {}}, out=out)
    path = out / "ledger.json"
    content, rng = path.read_bytes(), random.Random(4)
    for bit in rng.sample(range(8 * len(content)), 400):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(DataError, match=r"ledger\.json"):
            read_record(out)
    path.write_bytes(content)
    read_record(out)


def test_missing_or_truncated_parts_of_clean_output_are_refused(tmp_path: Path) -> None:
    """The ledger lists the parts."""
    out = tmp_path / "out"
    clean(write_lines(tmp_path / "a.jsonl", random_texts(1, 12)), {"unicode": {}}, out=out)
    part = out / "documents/part-00000.jsonl.zst"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(CorpusError, match=r"lists 'documents/.* but it has \d+ bytes; copy the"):
        find_corpus(out)
    part.unlink()
    with pytest.raises(CorpusError, match="but it is missing; copy the complete folder"):
        find_corpus(out)
