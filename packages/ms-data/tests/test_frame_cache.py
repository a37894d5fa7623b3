"""Decoded frames are kept in this process, or shared by the processes of a machine, unharmed."""

import multiprocessing
import os
import resource
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_data import SettingError, TokenStream
from ms_data.disk.frame_cache import SharedFrameCache
from ms_data.disk.shard import Frame, Shard

from .test_stream import Reader, rows_of
from .truth import random_documents, write_dataset

FRAME = 64


def frame(number: int, tokens: int = FRAME, ends: int = 3) -> Frame:
    """A frame that its number decides."""
    rng = np.random.default_rng(number)
    bounds = np.sort(rng.choice(np.arange(1, tokens + 1), min(ends, tokens), replace=False))
    return Frame(rng.integers(0, 1 << 16, tokens).astype(np.uint16), bounds, number * 7)


def same(one: Frame | None, other: Frame) -> bool:
    """Whether a kept frame is that frame."""
    return one is not None and all(map(np.array_equal, one, other))


def shared(folder: Path, frames: int = 8) -> SharedFrameCache:
    """A file with room for some frames."""
    size = frames * (32 + 2 * FRAME + FRAME // 4 * 8)
    return SharedFrameCache(
        folder, "some", frame_tokens=FRAME, token_type="uint16", size_bytes=size
    )


def fresh(cache: SharedFrameCache, number: int) -> Frame | None:
    """What lies in the file, whatever this process used last."""
    cache._last = None
    return cache.get(number)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Frames of 64 tokens, of which a sample of 24 takes parts."""
    documents = random_documents(3, 60, 90)
    folder = tmp_path_factory.mktemp("data") / "shards"
    return write_dataset(folder, documents, frame_tokens=FRAME)


def stream(folder: Path, place: Reader | None = None, **options: Any) -> TokenStream:
    """Whose epochs cross windows."""
    return TokenStream(
        folder, sequence_length=24, batch_size=6, seed=5, place=place, window_chunks=4, **options
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, FRAME), st.integers(0, FRAME)), max_size=30
    )
)
@settings(max_examples=40, deadline=None)
def test_what_is_found_is_what_was_kept(
    tmp_path_factory: pytest.TempPathFactory, kept: list[tuple[int, int, int]]
) -> None:
    """Or nothing, where another frame has the slot or there are more ends than fit into it."""
    cache = shared(tmp_path_factory.mktemp("any"))
    slots: dict[int, tuple[int, Frame]] = {}
    for number, tokens, ends in kept:
        value = frame(number, tokens, ends)
        cache.put(number, value)
        if 2 * tokens + 8 * len(value.ends) <= 2 * FRAME + FRAME // 4 * 8:
            slots[number % 8] = number, value
    for number in range(41):
        found = fresh(cache, number)
        held = slots.get(number % 8)
        if held is not None and held[0] == number:
            assert same(found, held[1])
        else:
            assert found is None


def test_ranks_share_one_decoding(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three readers get the rows of one that shares nothing, and decode each frame once in all."""
    plain = stream(dataset)
    epoch = plain.batches_per_epoch
    expected = [rows_of(batch) for batch in islice(plain, 2 * epoch)]
    decoded: list[tuple[Path, int]] = []
    read = Shard.read
    monkeypatch.setattr(
        Shard,
        "read",
        lambda self, number: decoded.append((self.path, number)) or read(self, number),
    )
    ranks = [
        stream(dataset, Reader(rank, 3), shared_cache=tmp_path, cache_mib=1) for rank in range(3)
    ]
    for rows in expected:
        assert [row for rank in ranks for row in rows_of(next(rank))] == rows
    assert decoded
    assert len(decoded) == len(set(decoded))
    assert len(list(tmp_path.iterdir())) == 1
    del ranks
    assert not list(tmp_path.iterdir())


def test_every_flipped_byte_of_the_shared_file_is_found(dataset: Path, tmp_path: Path) -> None:
    """A frame that was harmed there is decoded again from the shards."""
    cache = shared(tmp_path)
    value = frame(5)
    cache.put(5, value)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for at in range(5 * cache._slot_bytes, len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert fresh(cache, 5) is None, at
    path.write_bytes(content)
    assert same(fresh(cache, 5), value)

    expected = [rows_of(batch) for batch in islice(stream(dataset), 6)]
    reader, folder = stream(dataset, shared_cache=tmp_path / "."), tmp_path
    (other,) = [one for one in folder.iterdir() if one != path]
    for rows in expected:
        assert rows_of(next(reader)) == rows
        harmed = bytearray(other.read_bytes())
        harmed[::7] = bytes(len(harmed[::7]))
        other.write_bytes(harmed)


def _hammer(folder: Path, seed: int, wrong: Any) -> None:
    cache = shared(folder, frames=2)
    numbers = np.random.default_rng(seed).integers(0, 12, 4000)
    for number in numbers.tolist():
        found = fresh(cache, number)
        if found is None:
            cache.put(number, frame(number))
        elif not same(found, frame(number)):
            wrong.value += 1


def test_processes_that_write_one_slot_at_once_never_read_a_torn_frame(tmp_path: Path) -> None:
    """Twelve frames in two slots, written by three processes without a lock."""
    context = multiprocessing.get_context("fork")
    wrong = context.Value("i", 0)
    hands = [context.Process(target=_hammer, args=(tmp_path, seed, wrong)) for seed in range(3)]
    for hand in hands:
        hand.start()
    for hand in hands:
        hand.join(60)
        assert hand.exitcode == 0
    assert wrong.value == 0


def test_a_full_disk_ends_the_sharing_alone(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream goes on, and a warning says so once."""
    expected = [rows_of(batch) for batch in islice(stream(dataset), 6)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    reader = stream(dataset, shared_cache=tmp_path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        got = [rows_of(batch) for batch in islice(reader, 6)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert got == expected
    said = [record.message for record in caplog.records if "no longer shared" in record.message]
    assert said == ["decoded frames are no longer shared: File too large"]


def test_a_place_that_is_not_ones_own_is_refused(dataset: Path, tmp_path: Path) -> None:
    """A folder that is not there, and a link where the file would stand."""
    with pytest.raises(SettingError, match="such as /dev/shm"):
        stream(dataset, shared_cache=tmp_path / "nowhere")
    reader = stream(dataset, shared_cache=tmp_path)
    (path,) = tmp_path.iterdir()
    del reader
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingError, match="cannot be opened"):
        stream(dataset, shared_cache=tmp_path)
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(SettingError, match="cache_mib must be 0 or more, got -1"):
        stream(dataset, cache_mib=-1)


def test_a_fork_leaves_the_file_to_its_parent(dataset: Path, tmp_path: Path) -> None:
    """As workers that a loader forks end before it does."""
    reader = stream(dataset, shared_cache=tmp_path)
    process = multiprocessing.get_context("fork").Process(target=lambda: next(reader))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert len(list(tmp_path.iterdir())) == 1
    assert os.fstat(reader._sources[0]._split._frames._descriptor).st_nlink == 1  # type: ignore[attr-defined]
