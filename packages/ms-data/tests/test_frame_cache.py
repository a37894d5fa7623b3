"""The cache of decoded frames, per process or shared by the processes of a machine."""

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

from .reference_samples import random_documents, write_dataset
from .test_stream import Reader, rows_of

FRAME = 64


def frame(number: int, tokens: int = FRAME, ends: int = 3) -> Frame:
    """Return a frame determined by its number."""
    rng = np.random.default_rng(number)
    bounds = np.sort(rng.choice(np.arange(1, tokens + 1), min(ends, tokens), replace=False))
    return Frame(rng.integers(0, 1 << 16, tokens).astype(np.uint16), bounds, number * 7)


def is_same_frame(cached: Frame | None, expected: Frame) -> bool:
    """Return whether a cached frame has the expected content."""
    return cached is not None and all(map(np.array_equal, cached, expected))


def open_cache(folder: Path, frames: int = 8) -> SharedFrameCache:
    """Open a shared cache file with room for a few frames."""
    size = frames * (32 + 2 * FRAME + FRAME // 4 * 8)
    return SharedFrameCache(
        folder, "some", frame_tokens=FRAME, token_type="uint16", size_bytes=size
    )


def read_uncached(cache: SharedFrameCache, number: int) -> Frame | None:
    """Read from the file, bypassing the frame this process used last."""
    cache._last = None
    return cache.get(number)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset whose epochs take several windows."""
    documents = random_documents(3, 60, 90)
    folder = tmp_path_factory.mktemp("data") / "shards"
    return write_dataset(folder, documents, frame_tokens=FRAME)


def open_stream(folder: Path, place: Reader | None = None, **options: Any) -> TokenStream:
    """Open a stream whose epochs cross windows."""
    return TokenStream(
        folder, sequence_length=24, batch_size=6, seed=5, place=place, window_chunks=4, **options
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, FRAME), st.integers(0, FRAME)), max_size=30
    )
)
@settings(max_examples=40, deadline=None)
def test_a_cached_frame_is_returned_unchanged_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, puts: list[tuple[int, int, int]]
) -> None:
    """A lookup misses if another frame took the slot or the frame's document ends did not fit."""
    cache = open_cache(tmp_path_factory.mktemp("any"))
    slots: dict[int, tuple[int, Frame]] = {}
    for number, tokens, ends in puts:
        value = frame(number, tokens, ends)
        cache.put(number, value)
        if 2 * tokens + 8 * len(value.ends) <= 2 * FRAME + FRAME // 4 * 8:
            slots[number % 8] = number, value
    for number in range(41):
        cached = read_uncached(cache, number)
        stored = slots.get(number % 8)
        if stored is not None and stored[0] == number:
            assert is_same_frame(cached, stored[1])
        else:
            assert cached is None


def test_ranks_sharing_a_cache_decode_each_frame_once(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three readers return the rows of a reader without a cache."""
    reference = open_stream(dataset)
    epoch = reference.batches_per_epoch
    expected = [rows_of(batch) for batch in islice(reference, 2 * epoch)]
    decoded: list[tuple[Path, int]] = []
    original_read = Shard.read
    monkeypatch.setattr(
        Shard,
        "read",
        lambda self, number: decoded.append((self.path, number)) or original_read(self, number),
    )
    ranks = [
        open_stream(dataset, Reader(rank, 3), shared_cache=tmp_path, cache_mib=1)
        for rank in range(3)
    ]
    for rows in expected:
        assert [row for rank in ranks for row in rows_of(next(rank))] == rows
    assert decoded
    assert len(decoded) == len(set(decoded))
    assert len(list(tmp_path.iterdir())) == 1
    del ranks
    assert not list(tmp_path.iterdir())


def test_flipped_bytes_in_the_shared_cache_are_detected(dataset: Path, tmp_path: Path) -> None:
    """A damaged frame is decoded again from the shards."""
    cache = open_cache(tmp_path)
    value = frame(5)
    cache.put(5, value)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for offset in range(5 * cache._slot_bytes, len(content)):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        assert read_uncached(cache, 5) is None, offset
    path.write_bytes(content)
    assert is_same_frame(read_uncached(cache, 5), value)

    expected = [rows_of(batch) for batch in islice(open_stream(dataset), 6)]
    reader, folder = open_stream(dataset, shared_cache=tmp_path / "."), tmp_path
    (cache_file,) = [entry for entry in folder.iterdir() if entry != path]
    for rows in expected:
        assert rows_of(next(reader)) == rows
        damaged = bytearray(cache_file.read_bytes())
        damaged[::7] = bytes(len(damaged[::7]))
        cache_file.write_bytes(damaged)


def _write_and_check(folder: Path, seed: int, errors: Any) -> None:
    cache = open_cache(folder, frames=2)
    numbers = np.random.default_rng(seed).integers(0, 12, 4000)
    for number in numbers.tolist():
        cached = read_uncached(cache, number)
        if cached is None:
            cache.put(number, frame(number))
        elif not is_same_frame(cached, frame(number)):
            errors.value += 1


def test_concurrent_writers_of_a_slot_never_produce_a_torn_frame(tmp_path: Path) -> None:
    """Twelve frames in two slots, written by three processes without a lock."""
    context = multiprocessing.get_context("fork")
    errors = context.Value("i", 0)
    processes = [
        context.Process(target=_write_and_check, args=(tmp_path, seed, errors)) for seed in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert errors.value == 0


def test_a_full_disk_only_disables_sharing(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream continues and warns once."""
    expected = [rows_of(batch) for batch in islice(open_stream(dataset), 6)]
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    reader = open_stream(dataset, shared_cache=tmp_path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, old_limit[1]))
        rows = [rows_of(batch) for batch in islice(reader, 6)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
    assert rows == expected
    warnings = [record.message for record in caplog.records if "no longer shared" in record.message]
    assert warnings == ["decoded frames are no longer shared: File too large"]


def test_unsafe_cache_locations_are_refused(dataset: Path, tmp_path: Path) -> None:
    """A missing folder, and a symlink in place of the cache file."""
    with pytest.raises(SettingError, match="such as /dev/shm"):
        open_stream(dataset, shared_cache=tmp_path / "nowhere")
    reader = open_stream(dataset, shared_cache=tmp_path)
    (path,) = tmp_path.iterdir()
    del reader
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingError, match="cannot be opened"):
        open_stream(dataset, shared_cache=tmp_path)
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(SettingError, match="cache_mib must be 0 or more, got -1"):
        open_stream(dataset, cache_mib=-1)


def test_a_forked_child_does_not_remove_the_cache_file(dataset: Path, tmp_path: Path) -> None:
    """Forked data loader workers exit before their parent."""
    reader = open_stream(dataset, shared_cache=tmp_path)
    process = multiprocessing.get_context("fork").Process(target=lambda: next(reader))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert len(list(tmp_path.iterdir())) == 1
    assert os.fstat(reader._sources[0]._split._frames._descriptor).st_nlink == 1  # type: ignore[attr-defined]
