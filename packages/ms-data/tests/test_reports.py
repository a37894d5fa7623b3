"""What a build knows is told, what `verify` promises is checked, and odd places end in one line."""

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
    """Each flipped bit of build.json is found; what is not part of the dataset is named."""
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 20)
    train_tokenizer(tmp_path / "a.jsonl", vocab_size=270, out=tmp_path / "tokenizer.json")
    out = tmp_path / "out"
    build(tmp_path / "a.jsonl", tokenizer=tmp_path / "tokenizer.json", out=out)
    assert verify(out).ok
    path = out / "build.json"
    whole = path.read_bytes()
    for at in range(0, len(whole), 23):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        assert [fault.file for fault in verify(out).faults] == ["build.json"], at
        assert inspect(out).build is None
    path.write_bytes(whole)
    (out / "notes.txt").write_text("mine")
    report = verify(out)
    assert report.ok
    assert report.unchecked == ("notes.txt",)


def test_a_split_that_is_empty_is_told(tmp_path: Path) -> None:
    """Documents are chosen by their text, so a few different texts may all be in one split."""
    texts = "".join(f'{{"text": "text {n % 8}"}}\n' for n in range(300))
    (tmp_path / "a.jsonl").write_text(texts)
    train_tokenizer(tmp_path / "a.jsonl", vocab_size=270, out=tmp_path / "tokenizer.json")
    for held_out_fraction, says in (
        (1e-9, "selected none of 300 documents"),
        (0.9999999, "all 300"),
    ):
        made = build(
            tmp_path / "a.jsonl",
            tokenizer=tmp_path / "tokenizer.json",
            out=tmp_path / str(held_out_fraction),
            held_out_fraction=held_out_fraction,
        )
        assert [says in warning for warning in made.warnings] == [True]
        shown = inspect(tmp_path / str(held_out_fraction)).build
        assert shown is not None
        assert shown["warnings"] == list(made.warnings)


def test_a_folder_of_any_depth_is_read() -> None:
    """Python's own walk needs a stack as deep as the folders.

    So does pytest's cleanup, even in later runs: the folder is kept out of `tmp_path`.
    """
    root = Path(tempfile.mkdtemp())
    place = os.open(root, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=place)
        place, before = os.open("d", os.O_RDONLY, dir_fd=place), place
        os.close(before)
    os.close(os.open("deep.txt", os.O_CREAT | os.O_WRONLY, dir_fd=place))
    os.close(place)
    try:
        assert len(find_corpus(root).files) == 1
    finally:
        subprocess.run(["rm", "-rf", str(root)], check=True)


def test_a_stream_that_lives_to_the_end_of_the_interpreter_is_silent(tmp_path: Path) -> None:
    """Its shards are closed without names that are gone by then."""
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 20)
    train_tokenizer(tmp_path / "a.jsonl", vocab_size=270, out=tmp_path / "tokenizer.json")
    build(tmp_path / "a.jsonl", tokenizer=tmp_path / "tokenizer.json", out=tmp_path / "out")
    code = (
        "import sys; from ms_data import TokenStream\n"
        f"sys.kept = TokenStream({str(tmp_path / 'out')!r}, sequence_length=8, batch_size=1)\n"
        "next(sys.kept); sys.kept.me = sys.kept\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_table_that_pyarrow_cannot_read_is_not_called_damaged(tmp_path: Path) -> None:
    """A dictionary in DELTA_BYTE_ARRAY is intact and unsupported."""
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


def test_equal_values_are_one_bin() -> None:
    """Others are counted from the least to the greatest."""
    values = MeasuredValues()
    for _ in range(9):
        values.add(8, 9)
    assert values.bins(24) == [(8, 9)]
    values.add(4, 9)
    bins = values.bins(24)
    assert (bins[0], bins[-1]) == ((4, 1), (8, 9))


@pytest.mark.parametrize("found", [[0.8] * 9, [0.0, 1.0], [0.25, 0.5, 0.75]])
def test_shares_are_on_an_axis_from_0_to_1(found: list[float]) -> None:
    """Also where all are equal; that axis once ran to 24."""
    values = MeasuredValues()
    for value in found:
        values.add(value, 0.9)
    bins = values.bins(24)
    assert (bins[0][0], bins[-1][0]) == (0.0, 1.0)
    assert sum(count for _, count in bins) == len(found)
    for value in found:
        assert bins[min(23, int(value * 24))][1]


def test_advice_names_the_command_that_has_the_option(tmp_path: Path) -> None:
    """A function that others call cannot advise an option of the caller."""
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(CorpusError, match="`ms-data tokenizer --skip-invalid`"):
        train_tokenizer(tmp_path / "a.txt", vocab_size=257)
    (tmp_path / "b.txt").write_text("words")
    train_tokenizer(tmp_path / "b.txt", vocab_size=257, out=tmp_path / "tokenizer.json")
    with pytest.raises(CorpusError, match="; or skip invalid documents with `ms-data build"):
        build(tmp_path / "a.txt", tokenizer=tmp_path / "tokenizer.json", out=tmp_path / "out")
