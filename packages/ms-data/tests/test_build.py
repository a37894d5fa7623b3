"""A build is deterministic, whole or not there, and goes on after any end."""

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


def texts_of(seed: int, count: int, longest: int = 60) -> list[str]:
    """Some texts of up to `longest` words."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for _ in range(count)]


def write_lines(path: Path, texts: list[str]) -> Path:
    """Writes a JSON Lines file, packed as its name says."""
    content = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content[:100]) + gzip.compress(content[100:])
    if path.suffix == ".zst":
        pack = zstandard.ZstdCompressor(write_checksum=True).compress
        content = pack(content[:100]) + pack(content[100:])
    path.write_bytes(content)
    return path


def documents_in(folder: Path, tokenizer: Tokenizer, name: str = "train") -> list[str]:
    """The texts of a split, read back from its tokens."""
    split = Split(folder, name)
    pieces = np.split(split.read(0, split.tokens), split.all_ends())
    assert len(pieces.pop()) == 0
    assert all(piece[-1] == tokenizer.end_of_text for piece in pieces)
    return [tokenizer.decode(piece) for piece in pieces]


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder with its content."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text files in folders, a hidden one, an empty one, and JSON Lines of each packing."""
    folder = tmp_path_factory.mktemp("corpus")
    for number, text in enumerate(texts_of(1, 30)):
        place = folder / f"part{number % 3}"
        place.mkdir(exist_ok=True)
        (place / f"{number:02d}.txt").write_text(text)
    (folder / ".hidden").write_bytes(b"\xff")
    (folder / "empty.md").write_text("")
    write_lines(folder / "x.jsonl", texts_of(2, 40))
    write_lines(folder / "y.jsonl.gz", texts_of(3, 40))
    write_lines(folder / "z.jsonl.zst", texts_of(4, 40))
    return folder


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Tokenizer:
    """A small BPE of the corpus."""
    return train_tokenizer(corpus, vocab_size=320)


def expected_texts(corpus: Path) -> list[str]:
    """The corpus in order of file names."""
    files = [*corpus.glob("part*/*.txt")]
    lines = [text for seed in (2, 3, 4) for text in texts_of(seed, 40)]
    return [path.read_text() for path in sorted(files)] + lines


def test_tokens_give_back_every_text_in_order(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Files, JSON Lines, gzip and zstd of several members: each text is a document, in order."""
    summary = build(corpus, tokenizer=tokenizer, out=tmp_path / "out")
    expected = expected_texts(corpus)
    assert documents_in(tmp_path / "out", tokenizer) == expected
    assert summary.documents == len(expected)
    assert summary.text_bytes == sum(len(text.encode()) for text in expected)
    assert verify(tmp_path / "out").ok


def test_the_same_corpus_gives_the_same_bytes(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Nothing of the time, the place or the threads enters a dataset."""
    for name in ("one", "two"):
        build(corpus, tokenizer=tokenizer, out=tmp_path / name, held_out_fraction=0.2)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert sorted(files_of(tmp_path / "one")) == [
        "build.json",
        "index.json",
        "shard-00000.msd",
        "shard-00001.msd",
        "tokenizer.json",
    ]
    assert not (tmp_path / "one.partial").exists()


def test_held_out_documents_are_chosen_by_their_text(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Every document is in one split, equal texts in the same one, in about the share asked.

    150 documents at 0.3: the standard deviation of the share is 0.037, five of them 0.19.
    """
    build(corpus, tokenizer=tokenizer, out=tmp_path / "out", held_out_fraction=0.3)
    train = documents_in(tmp_path / "out", tokenizer)
    held = documents_in(tmp_path / "out", tokenizer, "held_out")
    assert sorted(train + held) == sorted(expected_texts(corpus))
    assert not set(train) & set(held)
    assert abs(len(held) / 150 - 0.3) < 0.19
    stream = TokenStream(tmp_path / "out", sequence_length=16, batch_size=2, split="held_out")
    assert stream.samples_per_epoch == inspect(tmp_path / "out").splits["held_out"].tokens // 16


def test_a_special_token_in_a_text_is_plain_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """No document can end itself early by spelling out the end of text."""
    text = "before <|endoftext|> after"
    (tmp_path / "a.txt").write_text(text)
    build(tmp_path / "a.txt", tokenizer=tokenizer, out=tmp_path / "out")
    assert documents_in(tmp_path / "out", tokenizer) == [text]
    assert tokenizer.end_of_text not in tokenizer.encode(text)


def test_shards_close_at_their_size_and_documents_stay_whole(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Several shards read as one row of documents; each one ends with a document."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefghij     ", k=40_000)) for _ in range(70)]
    write_lines(tmp_path / "a.jsonl", texts)
    summary = build(
        tmp_path / "a.jsonl", tokenizer=tokenizer, out=tmp_path / "out", shard_size_mib=1
    )
    assert summary.shards >= 2
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.msd")]
    assert max(sizes) < 1.3 * (1 << 20)
    assert documents_in(tmp_path / "out", tokenizer) == texts
    assert verify(tmp_path / "out").ok


def test_a_wide_vocabulary_is_stored_in_four_bytes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Past 65,536 tokens the token type grows, and texts come back all the same."""
    model = json.loads(tokenizer.content)
    last = max(model["model"]["vocab"].values())
    for number in range(last + 1, 70_000):
        model["model"]["vocab"][f"never {number}"] = number
    wide = Tokenizer(json.dumps(model).encode())
    (tmp_path / "a.txt").write_text("alpha beta")
    build(tmp_path / "a.txt", tokenizer=wide, out=tmp_path / "out")
    assert inspect(tmp_path / "out").token_type == "uint32"
    assert documents_in(tmp_path / "out", wide) == ["alpha beta"]


def test_the_standard_library_can_be_a_corpus(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """`stdlib` reads the running Python's sources, and leaves out what is broken on purpose."""
    source = find_corpus("stdlib")
    assert len(source.files) > 500
    assert not any("site-packages" in path.parts for path in source.files)
    text = next(islice(source.documents(), 5, None)).text
    assert "import" in text or "def" in text


INTERRUPTED = """
import sys, ms_data
from ms_data.engine import batches, run
run.SAVE_EVERY_S, batches.BATCH_CHARACTERS = 0.0, 40_000
more = {"held_out_fraction": 0.2, "shard_size_mib": 1}
ms_data.build(sys.argv[1], tokenizer=sys.argv[2], out=sys.argv[3], **more)
"""


def test_killed_builds_go_on_to_the_same_bytes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Kill -9 at random moments, again and again: the end equals an undisturbed build."""
    rng = random.Random(7)
    folder = tmp_path / "corpus"
    folder.mkdir()
    letters = "abcdefghijklmnop     "
    for number in range(4):
        texts = ["".join(rng.choices(letters, k=rng.randint(1, 9000))) for _ in range(170)]
        write_lines(folder / f"{number}.jsonl{('', '.gz', '.zst', '')[number]}", texts)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.content)
    build(
        folder, tokenizer=tokenizer, out=tmp_path / "calm", held_out_fraction=0.2, shard_size_mib=1
    )
    assert len(files_of(tmp_path / "calm")) >= 4

    out, journal = tmp_path / "out", tmp_path / "out.partial" / "journal.msgpack"
    command = [sys.executable, "-c", INTERRUPTED, folder, tmp_path / "tokenizer.json", out]
    kills = 0
    while kills < 10 and killed_after(rng.randint(1, 5), journal, command, rng):
        kills += 1
        assert journal.exists()
        assert not out.exists()
    assert kills
    subprocess.run(command, check=True, timeout=120)
    assert not journal.parent.exists()
    assert files_of(out) == files_of(tmp_path / "calm")


def killed_after(
    saves: int, journal: Path, command: Sequence[str | Path], rng: random.Random
) -> bool:
    """Kills a build some moments after a save; False where it was done before that."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        for _ in range(saves):
            await_change(journal, process)
        time.sleep(rng.uniform(0.0, 0.02))
        process.send_signal(signal.SIGKILL)
        status = process.wait()
    assert status in (0, -signal.SIGKILL)
    return status != 0


def await_change(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Waits until a process has renamed another file to `path`, or has ended."""

    def identity() -> tuple[int, int]:
        facts = facts_of(path)
        return (facts.st_ino, facts.st_mtime_ns) if facts else (0, 0)

    before, deadline = identity(), time.monotonic() + 60
    while process.poll() is None and identity() == before:
        assert time.monotonic() < deadline, "the build does not save"
        time.sleep(0.001)


def facts_of(path: Path) -> os.stat_result | None:
    """The facts of a file that another process makes and removes; None where it is not there."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def test_what_an_earlier_run_left_is_not_published(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Files of a run that died before its first save do not end up in the dataset."""
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "shard-00099.msd").write_bytes(b"left")
    build(corpus, tokenizer=tokenizer, out=tmp_path / "out")
    whole = ["build.json", "index.json", "shard-00000.msd", "tokenizer.json"]
    assert sorted(files_of(tmp_path / "out")) == whole


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    lost=st.lists(st.integers(1, 200), max_size=30),
    cut=st.integers(0, 30),
)
def test_a_writer_goes_on_from_its_state_whatever_was_written_after_it(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], lost: list[int], cut: int
) -> None:
    """Documents that were appended after the last state leave no trace in the shard."""
    folder = tmp_path_factory.mktemp("writer")
    documents = [np.arange(length) for length in lengths]
    for name in ("calm", "killed"):
        (folder / name).mkdir()

    def writer(name: str, state: ShardState | None = None) -> ShardWriter:
        path = folder / name / "shard-00000.msd"
        return ShardWriter(path, "train", token_type="uint16", frame_tokens=16, state=state)

    calm = writer("calm")
    for document in documents:
        calm.append(document)
    killed = writer("killed")
    for document in documents[:cut]:
        killed.append(document)
    state = killed.state()
    for length in lost:
        killed.append(np.full(length, 9))
    killed.abandon()
    again = writer("killed", state)
    for document in documents[cut:]:
        again.append(document)
    assert again.close() == calm.close()
    assert files_of(folder / "killed") == files_of(folder / "calm")


def interrupt(
    folder: Path, tokenizer: Tokenizer, out: Path, *, stop_at: int = 3, **changes: object
) -> None:
    """Starts a build that stops in its third batch, as an interrupt from the keyboard does."""
    seen = 0

    def stop(done: int, total: int) -> None:
        nonlocal seen
        seen += 1
        if seen == stop_at:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ms_data.engine.run.SAVE_EVERY_S", 0.0)
        patch.setattr("ms_data.engine.batches.BATCH_CHARACTERS", 1500)
        with pytest.raises(KeyboardInterrupt):
            build(folder, tokenizer=tokenizer, out=out, on_progress=stop, **changes)  # type: ignore[arg-type]


def test_an_interrupted_build_counts_as_if_it_had_not_been(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The summary of a build that went on is that of an undisturbed one."""
    calm = build(corpus, tokenizer=tokenizer, out=tmp_path / "calm")
    interrupt(corpus, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    went_on = build(corpus, tokenizer=tokenizer, out=tmp_path / "out")
    assert isinstance(went_on, Summary)
    assert (went_on.documents, went_on.tokens, went_on.text_bytes) == (
        calm.documents,
        calm.tokens,
        calm.text_bytes,
    )
    assert files_of(tmp_path / "out") == files_of(tmp_path / "calm")


@pytest.mark.parametrize("stop_at", [1, 2, 3, 5, 8])
def test_what_is_left_out_is_counted_once(
    tokenizer: Tokenizer, tmp_path: Path, stop_at: int
) -> None:
    """Invalid lines between, before and after documents count the same however often it stops."""
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text}) for text in texts_of(8, 140)]
    path.write_text("bad\n" + "\nbad\n".join(lines) + "\nbad\nbad\n")
    interrupt(path, tokenizer, tmp_path / "out", stop_at=stop_at, skip_invalid=True)
    summary = build(path, tokenizer=tokenizer, out=tmp_path / "out", skip_invalid=True)
    assert (summary.documents, summary.skipped) == (140, 142)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"held_out_fraction": 0.5}, "held_out_fraction"), ({"shard_size_mib": 3}, "shard_size")],
)
def test_another_build_does_not_go_on_from_an_interrupted_one(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, changes: dict[str, float], named: str
) -> None:
    """What was interrupted is kept and the difference named."""
    interrupt(corpus, tokenizer, tmp_path / "out")
    kept = files_of(tmp_path / "out.partial")
    with pytest.raises(OutputError, match=named):
        build(corpus, tokenizer=tokenizer, out=tmp_path / "out", **changes)  # type: ignore[arg-type]
    assert files_of(tmp_path / "out.partial") == kept


def test_a_corpus_that_changed_where_it_was_read_is_refused(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A file that was already read must be the same; one that is still to come may change."""
    folder = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    interrupt(folder, tokenizer, tmp_path / "out")
    late = write_lines(folder / "z.jsonl.zst", ["another text"])
    os.utime(folder / "part0" / "00.txt", (1, 1))
    with pytest.raises(OutputError, match="corpus"):
        build(folder, tokenizer=tokenizer, out=tmp_path / "out")
    os.utime(folder / "part0" / "00.txt", ns=(0, (corpus / "part0/00.txt").stat().st_mtime_ns))
    assert late.exists()
    build(folder, tokenizer=tokenizer, out=tmp_path / "out")
    build(folder, tokenizer=tokenizer, out=tmp_path / "calm")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "calm")


def test_names_that_are_not_utf8_do_not_stop_a_build(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A file system takes any bytes; an interrupted build goes on over them too."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number, text in enumerate(texts_of(6, 60)):
        Path(os.fsdecode(bytes(folder) + b"/\xff%02d.txt" % number)).write_text(text)
    interrupt(folder, tokenizer, tmp_path / "out")
    assert build(folder, tokenizer=tokenizer, out=tmp_path / "out").documents == 60


def test_a_bad_line_late_in_a_build_can_be_skipped_when_it_goes_on(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Work before the bad line is not lost: the same command with skip_invalid goes on."""
    path = write_lines(tmp_path / "a.jsonl", texts_of(5, 60))
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


def test_one_build_at_a_time_writes_a_folder(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A second build of the same folder is refused and harms nothing of the first."""
    aside = tmp_path / "out.partial"
    aside.mkdir()
    (aside / "shard-00000.msd").write_bytes(b"in work")
    descriptor = os.open(aside, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(OutputError, match="another build"):
        build(corpus, tokenizer=tokenizer, out=tmp_path / "out")
    assert (aside / "shard-00000.msd").read_bytes() == b"in work"
    os.close(descriptor)
    build(corpus, tokenizer=tokenizer, out=tmp_path / "out")


def test_a_failed_build_leaves_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """An error before the first save leaves neither the folder nor the one beside it."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("good")
    (tmp_path / "in" / "b.txt").write_bytes(b"bad \xff")
    with pytest.raises(CorpusError):
        build(tmp_path / "in", tokenizer=tokenizer, out=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_occupied_folder_is_refused_and_an_empty_one_taken(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Nothing that stands in the way is ever overwritten."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep")
    (tmp_path / "file").write_text("keep")
    for name, said in (("full", "not empty"), ("file", "which is a file")):
        with pytest.raises(OutputError, match=said):
            build(corpus, tokenizer=tokenizer, out=tmp_path / name)
    assert (tmp_path / "full" / "mine").read_text() == "keep"
    (tmp_path / "empty").mkdir()
    build(corpus, tokenizer=tokenizer, out=tmp_path / "empty")
    assert verify(tmp_path / "empty").ok


def test_a_folder_inside_the_corpus_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """By its real path too; a hidden one, which is never read, is taken."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for out in ("in/out", "link/out", "in/deep/out"):
        with pytest.raises(OutputError, match=r"is inside the corpus .*use a folder outside"):
            build(tmp_path / "in", tokenizer=tokenizer, out=tmp_path / out)
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["a.txt"]
    build(tmp_path / "in", tokenizer=tokenizer, out=tmp_path / "in" / ".made")


@pytest.mark.parametrize("going_on", [False, True])
def test_files_that_no_build_wrote_are_never_removed(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, going_on: bool
) -> None:
    """A folder that only has the name of ours is left as it is."""
    if going_on:
        interrupt(corpus, tokenizer, tmp_path / "out")
    aside = tmp_path / "out.partial"
    aside.mkdir(exist_ok=True)
    (aside / "thesis.tex").write_text("precious")
    (aside / "shard-00099.msd").write_bytes(b"mine")
    kept = files_of(aside)
    with pytest.raises(OutputError, match=r"holds thesis\.tex, which no build wrote"):
        build(corpus, tokenizer=tokenizer, out=tmp_path / "out")
    assert files_of(aside) == kept


@pytest.mark.parametrize("change", ["cut", "missing", "longer"])
@pytest.mark.parametrize("closed", [False, True])
def test_a_build_does_not_go_on_from_damaged_shards(
    tokenizer: Tokenizer, tmp_path: Path, change: str, closed: bool
) -> None:
    """Shards have the sizes that were noted; only an open one may have grown since."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    make = partial(
        DatasetWriter,
        folder,
        token_type="uint16",
        frame_tokens=16,
        shard_size_bytes=200 if closed else 10_000,
    )
    writer = make()
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
        make(state=state).abandon()
        return
    with pytest.raises(OutputError, match=r"damaged: has \d+ bytes, but \d+ were written; remove"):
        make(state=state)


@pytest.mark.parametrize("closed", [False, True])
def test_no_flipped_bit_of_an_interrupted_build_is_gone_on_from(
    tokenizer: Tokenizer, tmp_path: Path, closed: bool
) -> None:
    """Every byte of every shard that the journal counts is sealed by it, size unchanged or not."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    limit = 200 if closed else 10_000
    make = partial(
        DatasetWriter, folder, token_type="uint16", frame_tokens=16, shard_size_bytes=limit
    )
    writer = make()
    writer.append("train", np.arange(100))
    state = writer.state()
    writer.abandon()
    path = folder / "shard-00000.msd"
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(OutputError, match="damaged: checksum mismatch"):
            make(state=state)
    path.write_bytes(content)
    make(state=state).abandon()


def test_no_flipped_bit_of_a_builds_record_is_believed(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """By which the same command again has nothing to do: 100 bits, one at a time."""
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


def test_changed_settings_are_told_with_what_they_were(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Both values of each setting in one line; a larger limit alone is no other build."""
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
def test_a_share_outside_its_range_is_refused(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, value: float
) -> None:
    """The held-out share is from 0 to below 1."""
    with pytest.raises(SettingError, match="held_out_fraction"):
        build(corpus, tokenizer=tokenizer, out=tmp_path / "out", held_out_fraction=value)
