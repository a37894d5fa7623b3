"""Warnings, `verify` coverage and unusual inputs are reported in one line."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from ms_data import CorpusError, build, inspect, train_tokenizer, verify
from ms_data.corpus.find import find_corpus
from ms_data.ledger.entries import MeasuredValues


def test_verify_covers_build_json_and_names_other_files(tmp_path: Path) -> None:
    """Flipped bits in build.json are detected; files outside the dataset are listed."""
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 20)
    train_tokenizer(tmp_path / "a.jsonl", vocab_size=270, out=tmp_path / "tokenizer.json")
    out = tmp_path / "out"
    build(tmp_path / "a.jsonl", tokenizer=tmp_path / "tokenizer.json", out=out)
    assert verify(out).ok
    path = out / "build.json"
    original = path.read_bytes()
    for offset in range(0, len(original), 23):
        path.write_bytes(
            original[:offset] + bytes([original[offset] ^ 1 << offset % 8]) + original[offset + 1 :]
        )
        assert [fault.file for fault in verify(out).faults] == ["build.json"], offset
        assert inspect(out).build is None
    path.write_bytes(original)
    (out / "notes.txt").write_text("mine")
    report = verify(out)
    assert report.ok
    assert report.unchecked == ("notes.txt",)


def test_an_empty_split_gives_a_warning(tmp_path: Path) -> None:
    """The text decides the split, so few distinct texts may all land in one."""
    texts = "".join(f'{{"text": "text {n % 8}"}}\n' for n in range(300))
    (tmp_path / "a.jsonl").write_text(texts)
    train_tokenizer(tmp_path / "a.jsonl", vocab_size=270, out=tmp_path / "tokenizer.json")
    for held_out_fraction, message in (
        (1e-9, "selected none of 300 documents"),
        (0.9999999, "all 300"),
    ):
        summary = build(
            tmp_path / "a.jsonl",
            tokenizer=tmp_path / "tokenizer.json",
            out=tmp_path / str(held_out_fraction),
            held_out_fraction=held_out_fraction,
        )
        assert [message in warning for warning in summary.warnings] == [True]
        record = inspect(tmp_path / str(held_out_fraction)).build
        assert record is not None
        assert record["warnings"] == list(summary.warnings)


def test_a_folder_of_any_depth_is_read() -> None:
    """os.walk would need a stack as deep as the folders.

    So would pytest's cleanup, even in later runs; the folder is therefore outside `tmp_path`.
    """
    root = Path(tempfile.mkdtemp())
    descriptor = os.open(root, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=descriptor)
        descriptor, parent = os.open("d", os.O_RDONLY, dir_fd=descriptor), descriptor
        os.close(parent)
    os.close(os.open("deep.txt", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
    os.close(descriptor)
    try:
        assert len(find_corpus(root).files) == 1
    finally:
        subprocess.run(["rm", "-rf", str(root)], check=True)


def test_a_stream_alive_at_interpreter_exit_is_silent(tmp_path: Path) -> None:
    """Shards are closed without globals that no longer exist."""
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 20)
    train_tokenizer(tmp_path / "a.jsonl", vocab_size=270, out=tmp_path / "tokenizer.json")
    build(tmp_path / "a.jsonl", tokenizer=tmp_path / "tokenizer.json", out=tmp_path / "out")
    code = (
        "import sys; from ms_data import TokenStream\n"
        f"sys.stream = TokenStream({str(tmp_path / 'out')!r}, sequence_length=8, batch_size=1)\n"
        "next(sys.stream); sys.stream.me = sys.stream\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_an_unsupported_parquet_encoding_is_not_called_damage(tmp_path: Path) -> None:
    """A dictionary in DELTA_BYTE_ARRAY is valid but unsupported by pyarrow."""
    table = pyarrow.table({"text": pyarrow.array(["a", "b", "a"]).dictionary_encode()})
    pyarrow.parquet.write_table(
        table,
        tmp_path / "a.parquet",
        use_dictionary=False,
        column_encoding={"text": "DELTA_BYTE_ARRAY"},
    )
    train_text = tmp_path / "t.txt"
    train_text.write_text("some words")
    train_tokenizer(train_text, vocab_size=257, out=tmp_path / "tokenizer.json")
    with pytest.raises(CorpusError, match="pyarrow does not support this Parquet table"):
        build(tmp_path / "a.parquet", tokenizer=tmp_path / "tokenizer.json", out=tmp_path / "out")


def test_equal_values_fall_into_one_bin() -> None:
    """Other values are binned from minimum to maximum."""
    values = MeasuredValues()
    for _ in range(9):
        values.add(8, 9)
    assert values.bins(24) == [(8, 9)]
    values.add(4, 9)
    bins = values.bins(24)
    assert (bins[0], bins[-1]) == ((4, 1), (8, 9))


@pytest.mark.parametrize("fractions", [[0.8] * 9, [0.0, 1.0], [0.25, 0.5, 0.75]])
def test_fractions_are_binned_from_0_to_1(fractions: list[float]) -> None:
    """Even if all are equal."""
    values = MeasuredValues()
    for value in fractions:
        values.add(value, 0.9)
    bins = values.bins(24)
    assert (bins[0][0], bins[-1][0]) == (0.0, 1.0)
    assert sum(count for _, count in bins) == len(fractions)
    for value in fractions:
        assert bins[min(23, int(value * 24))][1]


def test_advice_names_the_command_that_offers_the_option(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(CorpusError, match="`ms-data tokenizer --skip-invalid`"):
        train_tokenizer(tmp_path / "a.txt", vocab_size=257)
    (tmp_path / "b.txt").write_text("words")
    train_tokenizer(tmp_path / "b.txt", vocab_size=257, out=tmp_path / "tokenizer.json")
    with pytest.raises(CorpusError, match="; or skip invalid documents with `ms-data build"):
        build(tmp_path / "a.txt", tokenizer=tmp_path / "tokenizer.json", out=tmp_path / "out")
