"""Builds are deterministic, atomic and resumable."""

import fcntl
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_data import (
    CorpusError,
    OutputError,
    SettingError,
    Summary,
    Tokenizer,
    TokenStream,
    build,
    inspect,
    train_tokenizer,
    verify,
)
from ms_data.corpus.find import find_corpus
from ms_data.disk.split import Split
from ms_data.disk.writer import DatasetWriter, ShardState, ShardWriter

WORDS = ["alpha", "beta", "gamma", "δέλτα", "日本", "naïve", "def", "return", "\n", "    ", "42"]


def random_texts(seed: int, count: int, max_words: int = 60) -> list[str]:
    """Return `count` random texts of up to `max_words` words."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, max_words))) for _ in range(count)]


def write_lines(path: Path, texts: list[str]) -> Path:
    """Write a JSON Lines file, compressed according to its suffix."""
    content = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content[:100]) + gzip.compress(content[100:])
    if path.suffix == ".zst":
        compress = zstandard.ZstdCompressor(write_checksum=True).compress
        content = compress(content[:100]) + compress(content[100:])
    path.write_bytes(content)
    return path


def decode_split(folder: Path, tokenizer: Tokenizer, name: str = "train") -> list[str]:
    """Decode all documents of a split."""
    split = Split(folder, name)
    pieces = np.split(split.read(0, split.tokens), split.all_ends())
    assert len(pieces.pop()) == 0
    assert all(piece[-1] == tokenizer.end_of_text for piece in pieces)
    return [tokenizer.decode(piece) for piece in pieces]


def read_files(folder: Path) -> dict[str, bytes]:
    """Map the name of each file in a folder to its content."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text files in subfolders, a hidden and an empty file, and plain, gzip and zstd JSON Lines."""
    folder = tmp_path_factory.mktemp("corpus")
    for number, text in enumerate(random_texts(1, 30)):
        subfolder = folder / f"part{number % 3}"
        subfolder.mkdir(exist_ok=True)
        (subfolder / f"{number:02d}.txt").write_text(text)
    (folder / ".hidden").write_bytes(b"\xff")
    (folder / "empty.md").write_text("")
    write_lines(folder / "x.jsonl", random_texts(2, 40))
    write_lines(folder / "y.jsonl.gz", random_texts(3, 40))
    write_lines(folder / "z.jsonl.zst", random_texts(4, 40))
    return folder


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Tokenizer:
    """A small BPE tokenizer trained on the corpus."""
    return train_tokenizer(corpus, vocab_size=320)


def expected_texts(corpus: Path) -> list[str]:
    """The texts of the corpus in file order."""
    files = [*corpus.glob("part*/*.txt")]
    lines = [text for seed in (2, 3, 4) for text in random_texts(seed, 40)]
    return [path.read_text() for path in sorted(files)] + lines


def test_decoded_documents_equal_the_corpus_in_order(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Covers text files, JSON Lines, and multi-member gzip and zstd."""
    summary = build(corpus, tokenizer=tokenizer, out=tmp_path / "out")
    expected = expected_texts(corpus)
    assert decode_split(tmp_path / "out", tokenizer) == expected
    assert summary.documents == len(expected)
    assert summary.text_bytes == sum(len(text.encode()) for text in expected)
    assert verify(tmp_path / "out").ok


def test_building_the_same_corpus_twice_gives_identical_bytes(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        build(corpus, tokenizer=tokenizer, out=tmp_path / name, held_out_fraction=0.2)
    assert read_files(tmp_path / "one") == read_files(tmp_path / "two")
    assert sorted(read_files(tmp_path / "one")) == [
        "build.json",
        "index.json",
        "shard-00000.msd",
        "shard-00001.msd",
        "tokenizer.json",
    ]
    assert not (tmp_path / "one.partial").exists()


def test_held_out_split_depends_on_the_text_alone(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Each document lands in one split, equal texts in the same one.

    For 150 documents at 0.3, the held-out fraction has standard deviation 0.037; allow five.
    """
    build(corpus, tokenizer=tokenizer, out=tmp_path / "out", held_out_fraction=0.3)
    train = decode_split(tmp_path / "out", tokenizer)
    held_out = decode_split(tmp_path / "out", tokenizer, "held_out")
    assert sorted(train + held_out) == sorted(expected_texts(corpus))
    assert not set(train) & set(held_out)
    assert abs(len(held_out) / 150 - 0.3) < 0.19
    stream = TokenStream(tmp_path / "out", sequence_length=16, batch_size=2, split="held_out")
    assert stream.samples_per_epoch == inspect(tmp_path / "out").splits["held_out"].tokens // 16


def test_special_token_strings_in_text_are_encoded_as_plain_text(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A document cannot end early by containing the end-of-text string."""
    text = "before <|endoftext|> after"
    (tmp_path / "a.txt").write_text(text)
    build(tmp_path / "a.txt", tokenizer=tokenizer, out=tmp_path / "out")
    assert decode_split(tmp_path / "out", tokenizer) == [text]
    assert tokenizer.end_of_text not in tokenizer.encode(text)


def test_shards_stay_near_the_size_limit_and_never_split_documents(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefghij     ", k=40_000)) for _ in range(70)]
    write_lines(tmp_path / "a.jsonl", texts)
    summary = build(
        tmp_path / "a.jsonl", tokenizer=tokenizer, out=tmp_path / "out", shard_size_mib=1
    )
    assert summary.shards >= 2
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.msd")]
    assert max(sizes) < 1.3 * (1 << 20)
    assert decode_split(tmp_path / "out", tokenizer) == texts
    assert verify(tmp_path / "out").ok


def test_vocabularies_above_65536_tokens_are_stored_as_uint32(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = json.loads(tokenizer.content)
    max_id = max(model["model"]["vocab"].values())
    for number in range(max_id + 1, 70_000):
        model["model"]["vocab"][f"never {number}"] = number
    wide = Tokenizer(json.dumps(model).encode())
    (tmp_path / "a.txt").write_text("alpha beta")
    build(tmp_path / "a.txt", tokenizer=wide, out=tmp_path / "out")
    assert inspect(tmp_path / "out").token_type == "uint32"
    assert decode_split(tmp_path / "out", wide) == ["alpha beta"]


def test_stdlib_corpus_reads_the_sources_of_the_running_python(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Deliberately broken sources are skipped."""
    source = find_corpus("stdlib")
    assert len(source.files) > 500
    assert not any("site-packages" in path.parts for path in source.files)
    text = next(islice(source.documents(), 5, None)).text
    assert "import" in text or "def" in text


SAVE_OFTEN = """
import sys, ms_data
from ms_data.engine import batches, run
run.SAVE_EVERY_S, batches.BATCH_CHARACTERS = 0.0, 40_000
more = {"held_out_fraction": 0.2, "shard_size_mib": 1}
ms_data.build(sys.argv[1], tokenizer=sys.argv[2], out=sys.argv[3], **more)
"""


def test_builds_killed_at_random_resume_to_identical_bytes(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Repeated SIGKILL at random moments."""
    rng = random.Random(7)
    folder = tmp_path / "corpus"
    folder.mkdir()
    letters = "abcdefghijklmnop     "
    for number in range(4):
        texts = ["".join(rng.choices(letters, k=rng.randint(1, 9000))) for _ in range(170)]
        write_lines(folder / f"{number}.jsonl{('', '.gz', '.zst', '')[number]}", texts)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.content)
    build(
        folder,
        tokenizer=tokenizer,
        out=tmp_path / "reference",
        held_out_fraction=0.2,
        shard_size_mib=1,
    )
    assert len(read_files(tmp_path / "reference")) >= 4

    out, journal = tmp_path / "out", tmp_path / "out.partial" / "journal.msgpack"
    command = [sys.executable, "-c", SAVE_OFTEN, folder, tmp_path / "tokenizer.json", out]
    kills = 0
    while kills < 4 and kill_after_saves(rng.randint(1, 5), journal, command, rng):
        kills += 1
        assert journal.exists()
        assert not out.exists()
    assert kills
    subprocess.run(command, check=True, timeout=120)
    assert not journal.parent.exists()
    assert read_files(out) == read_files(tmp_path / "reference")


def kill_after_saves(
    saves: int, journal: Path, command: Sequence[str | Path], rng: random.Random
) -> bool:
    """Kill a build shortly after its n-th save. Return False if it finished first."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        for _ in range(saves):
            await_change(journal, process)
        time.sleep(rng.uniform(0.0, 0.02))
        process.send_signal(signal.SIGKILL)
        status = process.wait()
    assert status in (0, -signal.SIGKILL)
    return status != 0


def await_change(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until another process replaces `path` or exits."""

    def file_id() -> tuple[int, int]:
        info = stat_or_none(path)
        return (info.st_ino, info.st_mtime_ns) if info else (0, 0)

    old_id, deadline = file_id(), time.monotonic() + 60
    while process.poll() is None and file_id() == old_id:
        assert time.monotonic() < deadline, "the build does not save"
        time.sleep(0.001)


def stat_or_none(path: Path) -> os.stat_result | None:
    """Return the stat result of a file, or None if it is absent."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def test_leftovers_of_a_run_killed_before_its_first_save_are_not_published(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "shard-00099.msd").write_bytes(b"left")
    build(corpus, tokenizer=tokenizer, out=tmp_path / "out")
    names = ["build.json", "index.json", "shard-00000.msd", "tokenizer.json"]
    assert sorted(read_files(tmp_path / "out")) == names


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    lost_lengths=st.lists(st.integers(1, 200), max_size=30),
    cut=st.integers(0, 30),
)
def test_writer_resumes_from_its_state_whatever_was_written_since(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], lost_lengths: list[int], cut: int
) -> None:
    """Documents appended after the last state leave no trace in the shard."""
    folder = tmp_path_factory.mktemp("writer")
    documents = [np.arange(length) for length in lengths]
    for name in ("reference", "killed"):
        (folder / name).mkdir()

    def writer(name: str, state: ShardState | None = None) -> ShardWriter:
        path = folder / name / "shard-00000.msd"
        return ShardWriter(path, "train", token_type="uint16", frame_tokens=16, state=state)

    reference = writer("reference")
    for document in documents:
        reference.append(document)
    killed = writer("killed")
    for document in documents[:cut]:
        killed.append(document)
    state = killed.state()
    for length in lost_lengths:
        killed.append(np.full(length, 9))
    killed.abandon()
    resumed = writer("killed", state)
    for document in documents[cut:]:
        resumed.append(document)
    assert resumed.close() == reference.close()
    assert read_files(folder / "killed") == read_files(folder / "reference")


def interrupt(
    folder: Path, tokenizer: Tokenizer, out: Path, *, stop_at_call: int = 3, **options: object
) -> None:
    """Start a build and interrupt it at its n-th progress call, as Ctrl-C does."""
    calls = 0

    def interrupt_at(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == stop_at_call:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ms_data.engine.run.SAVE_EVERY_S", 0.0)
        patch.setattr("ms_data.engine.batches.BATCH_CHARACTERS", 1500)
        with pytest.raises(KeyboardInterrupt):
            build(folder, tokenizer=tokenizer, out=out, on_progress=interrupt_at, **options)  # type: ignore[arg-type]


def test_a_resumed_build_has_the_same_summary_as_an_uninterrupted_one(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    reference = build(corpus, tokenizer=tokenizer, out=tmp_path / "reference")
    interrupt(corpus, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    resumed = build(corpus, tokenizer=tokenizer, out=tmp_path / "out")
    assert isinstance(resumed, Summary)
    assert (resumed.documents, resumed.tokens, resumed.text_bytes) == (
        reference.documents,
        reference.tokens,
        reference.text_bytes,
    )
    assert read_files(tmp_path / "out") == read_files(tmp_path / "reference")


@pytest.mark.parametrize("stop_at_call", [1, 2, 3, 5, 8])
def test_skipped_lines_are_counted_once_across_an_interruption(
    tokenizer: Tokenizer, tmp_path: Path, stop_at_call: int
) -> None:
    """Invalid lines come before, between and after documents."""
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text}) for text in random_texts(8, 140)]
    path.write_text("bad\n" + "\nbad\n".join(lines) + "\nbad\nbad\n")
    interrupt(path, tokenizer, tmp_path / "out", stop_at_call=stop_at_call, skip_invalid=True)
    summary = build(path, tokenizer=tokenizer, out=tmp_path / "out", skip_invalid=True)
    assert (summary.documents, summary.skipped) == (140, 142)


@pytest.mark.parametrize(
    ("options", "setting"),
    [({"held_out_fraction": 0.5}, "held_out_fraction"), ({"shard_size_mib": 3}, "shard_size")],
)
def test_resuming_with_different_settings_is_refused_and_keeps_the_partial_build(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, options: dict[str, float], setting: str
) -> None:
    interrupt(corpus, tokenizer, tmp_path / "out")
    before = read_files(tmp_path / "out.partial")
    with pytest.raises(OutputError, match=setting):
        build(corpus, tokenizer=tokenizer, out=tmp_path / "out", **options)  # type: ignore[arg-type]
    assert read_files(tmp_path / "out.partial") == before


def test_resuming_refuses_a_change_in_a_file_already_read(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Files not yet read may change."""
    folder = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    interrupt(folder, tokenizer, tmp_path / "out")
    unread = write_lines(folder / "z.jsonl.zst", ["another text"])
    os.utime(folder / "part0" / "00.txt", (1, 1))
    with pytest.raises(OutputError, match="corpus"):
        build(folder, tokenizer=tokenizer, out=tmp_path / "out")
    os.utime(folder / "part0" / "00.txt", ns=(0, (corpus / "part0/00.txt").stat().st_mtime_ns))
    assert unread.exists()
    build(folder, tokenizer=tokenizer, out=tmp_path / "out")
    build(folder, tokenizer=tokenizer, out=tmp_path / "reference")
    assert read_files(tmp_path / "out") == read_files(tmp_path / "reference")


def test_file_names_that_are_not_utf8_are_built_and_resumed(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number, text in enumerate(random_texts(6, 60)):
        Path(os.fsdecode(bytes(folder) + b"/\xff%02d.txt" % number)).write_text(text)
    interrupt(folder, tokenizer, tmp_path / "out")
    assert build(folder, tokenizer=tokenizer, out=tmp_path / "out").documents == 60


def test_a_build_that_failed_on_a_bad_line_resumes_with_skip_invalid(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Work done before the bad line is kept."""
    path = write_lines(tmp_path / "a.jsonl", random_texts(5, 60))
    with path.open("ab") as file:
        file.write(b"{broken\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ms_data.engine.run.SAVE_EVERY_S", 0.0)
        patch.setattr("ms_data.engine.batches.BATCH_CHARACTERS", 1500)
        with pytest.raises(CorpusError, match=r"a\.jsonl:61") as caught:
            build(path, tokenizer=tokenizer, out=tmp_path / "out")
    assert "same command resumes" in caught.value.__notes__[0]
    summary = build(path, tokenizer=tokenizer, out=tmp_path / "out", skip_invalid=True)
    assert (summary.documents, summary.skipped) == (60, 1)


def test_a_second_build_into_the_same_folder_is_refused(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The first build's files are untouched."""
    partial_folder = tmp_path / "out.partial"
    partial_folder.mkdir()
    (partial_folder / "shard-00000.msd").write_bytes(b"in work")
    descriptor = os.open(partial_folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(OutputError, match="another build"):
        build(corpus, tokenizer=tokenizer, out=tmp_path / "out")
    assert (partial_folder / "shard-00000.msd").read_bytes() == b"in work"
    os.close(descriptor)
    build(corpus, tokenizer=tokenizer, out=tmp_path / "out")


def test_a_build_that_fails_before_its_first_save_leaves_no_files(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("good")
    (tmp_path / "in" / "b.txt").write_bytes(b"bad \xff")
    with pytest.raises(CorpusError):
        build(tmp_path / "in", tokenizer=tokenizer, out=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_existing_output_is_refused_unless_it_is_an_empty_folder(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep")
    (tmp_path / "file").write_text("keep")
    for name, message in (("full", "not empty"), ("file", "which is a file")):
        with pytest.raises(OutputError, match=message):
            build(corpus, tokenizer=tokenizer, out=tmp_path / name)
    assert (tmp_path / "full" / "mine").read_text() == "keep"
    (tmp_path / "empty").mkdir()
    build(corpus, tokenizer=tokenizer, out=tmp_path / "empty")
    assert verify(tmp_path / "empty").ok


def test_output_inside_the_corpus_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Symlinks are resolved. Hidden folders are allowed since they are never read."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for out in ("in/out", "link/out", "in/deep/out"):
        with pytest.raises(OutputError, match=r"is inside the corpus .*use a folder outside"):
            build(tmp_path / "in", tokenizer=tokenizer, out=tmp_path / out)
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["a.txt"]
    build(tmp_path / "in", tokenizer=tokenizer, out=tmp_path / "in" / ".made")


@pytest.mark.parametrize("interrupted", [False, True])
def test_unknown_files_in_the_partial_folder_are_never_removed(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, interrupted: bool
) -> None:
    if interrupted:
        interrupt(corpus, tokenizer, tmp_path / "out")
    partial_folder = tmp_path / "out.partial"
    partial_folder.mkdir(exist_ok=True)
    (partial_folder / "thesis.tex").write_text("precious")
    (partial_folder / "shard-00099.msd").write_bytes(b"mine")
    before = read_files(partial_folder)
    with pytest.raises(OutputError, match=r"holds thesis\.tex, which no build wrote"):
        build(corpus, tokenizer=tokenizer, out=tmp_path / "out")
    assert read_files(partial_folder) == before


@pytest.mark.parametrize("change", ["cut", "missing", "longer"])
@pytest.mark.parametrize("closed", [False, True])
def test_resuming_from_shards_of_the_wrong_size_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, change: str, closed: bool
) -> None:
    """Only the open shard may have grown since the state was saved."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    open_writer = partial(
        DatasetWriter,
        folder,
        token_type="uint16",
        frame_tokens=16,
        shard_size_bytes=200 if closed else 10_000,
    )
    writer = open_writer()
    writer.append("train", np.arange(100))
    state = writer.state()
    writer.abandon()
    assert bool(state.closed) == closed
    path = folder / "shard-00000.msd"
    content = path.read_bytes()
    path.unlink()
    if change != "missing":
        path.write_bytes(content[:-1] if change == "cut" else content + b"\0")
    if change == "longer" and not closed:
        open_writer(state=state).abandon()
        return
    with pytest.raises(OutputError, match=r"damaged: has \d+ bytes, but \d+ were written; remove"):
        open_writer(state=state)


@pytest.mark.parametrize("closed", [False, True])
def test_resuming_detects_a_flipped_bit_in_any_shard(
    tokenizer: Tokenizer, tmp_path: Path, closed: bool
) -> None:
    """The journal holds checksums of all shards it covers."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    shard_size_bytes = 200 if closed else 10_000
    open_writer = partial(
        DatasetWriter,
        folder,
        token_type="uint16",
        frame_tokens=16,
        shard_size_bytes=shard_size_bytes,
    )
    writer = open_writer()
    writer.append("train", np.arange(100))
    state = writer.state()
    writer.abandon()
    path = folder / "shard-00000.msd"
    content = path.read_bytes()
    for offset in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[offset] ^= 1 << offset % 8
        path.write_bytes(damaged)
        with pytest.raises(OutputError, match="damaged: checksum mismatch"):
            open_writer(state=state)
    path.write_bytes(content)
    open_writer(state=state).abandon()


def test_a_flipped_bit_in_build_json_is_detected(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A corrupt record must not pass as a finished build. Tries 100 single-bit flips."""
    out = tmp_path / "out"
    build(corpus, tokenizer=tokenizer, out=out)
    path = out / "build.json"
    content, rng = path.read_bytes(), random.Random(7)
    for bit in rng.sample(range(8 * len(content)), 100):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(OutputError, match=r"build\.json"):
            build(corpus, tokenizer=tokenizer, out=out)
    path.write_bytes(content)
    assert build(corpus, tokenizer=tokenizer, out=out).built_before


def test_changed_settings_are_reported_with_old_and_new_values(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Raising a limit alone does not make it a different build."""
    interrupt(corpus, tokenizer, tmp_path / "out")
    with pytest.raises(
        OutputError, match=r"held_out_fraction is 0\.5, was 0\.0; text_column is 'x', was 'text'"
    ):
        build(
            corpus,
            tokenizer=tokenizer,
            out=tmp_path / "out",
            held_out_fraction=0.5,
            text_column="x",
        )
    build(corpus, tokenizer=tokenizer, out=tmp_path / "out", document_limit_mib=64)


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_held_out_fraction_outside_0_to_1_is_refused(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, value: float
) -> None:
    with pytest.raises(SettingError, match="held_out_fraction"):
        build(corpus, tokenizer=tokenizer, out=tmp_path / "out", held_out_fraction=value)
