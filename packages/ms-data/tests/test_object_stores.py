"""Streams over object stores: equal to a local folder, under faults, with a bounded cache."""

import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import ms_data
from ms_data.errors import DamageError, RemoteError, SettingError

from .faulty_proxy import FAULTS, FaultyProxy
from .reference_samples import random_documents, write_dataset

KEYS = ("tokens", "targets", "positions", "documents")
SETTINGS = {"sequence_length": 64, "batch_size": 8, "seed": 3, "window_chunks": 4}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five shards of about 50 kB with small frames."""
    documents = random_documents(1, 1500, 200)
    folder = tmp_path_factory.mktemp("data") / "shards"
    return write_dataset(folder, documents, frame_tokens=1024, documents_per_shard=300)


@pytest.fixture
def url(shards: Path) -> Iterator[str]:
    """The shards in fsspec's memory file system."""
    memory = fsspec.filesystem("memory")
    for file in shards.iterdir():
        memory.pipe_file(f"/bucket/shards/{file.name}", file.read_bytes())
    yield "memory://bucket/shards"
    memory.rm("/bucket", recursive=True)


def remote(url: str, cache: Path, **settings: Any) -> ms_data.RemoteShards:
    """The shards at a URL with small blocks."""
    return ms_data.RemoteShards(url, cache=cache, **{"block_kib": 4, **settings})


def check_equal(stream: Any, expected: Any, batches: int) -> int:
    """Compare batches; return the number of compared values."""
    count = 0
    for _ in range(batches):
        ours, theirs = next(stream), next(expected)
        for key in KEYS:
            assert np.array_equal(ours[key], theirs[key])
            count += ours[key].size
    return count


def test_batches_equal_those_of_a_local_folder(shards: Path, url: str, tmp_path: Path) -> None:
    """More than one epoch; a second stream, resumed in the middle, reads from the cache."""
    local = ms_data.TokenStream(shards, **SETTINGS)
    batches = local.batches_per_epoch + 5
    source = remote(url, tmp_path / "cache")
    stream = ms_data.TokenStream(source, **SETTINGS)
    assert check_equal(stream, local, batches) > 100_000
    state = stream.state_dict()
    assert "memory" not in str(state)
    fsspec.filesystem("memory").rm("/bucket", recursive=True)  # all is cached, but the index
    fsspec.filesystem("memory").pipe_file(
        "/bucket/shards/index.json", (shards / "index.json").read_bytes()
    )
    resumed = ms_data.TokenStream(remote(url, tmp_path / "cache"), **SETTINGS)
    resumed.load_state_dict(state)
    check_equal(resumed, local, 5)


def test_a_url_is_enough_and_copies_are_for_other_processes(
    shards: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is below XDG_CACHE_HOME; a pickled folder connects again; `file://` works."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    check_equal(ms_data.TokenStream(url, **SETTINGS), ms_data.TokenStream(shards, **SETTINGS), 3)
    assert list((tmp_path / "xdg" / "ms-data" / "blocks").iterdir())
    source = pickle.loads(pickle.dumps(ms_data.RemoteShards(shards.as_uri())))  # noqa: S301
    mixed = {"a": source, "b": shards}
    local = ms_data.TokenStream({"a": shards, "b": shards}, **SETTINGS)
    check_equal(ms_data.TokenStream(mixed, **SETTINGS), local, 3)


def test_the_cache_stays_within_its_limit(shards: Path, tmp_path: Path) -> None:
    """The oldest blocks of a cache smaller than the data are removed, and rows stay right."""
    total = sum(file.stat().st_size for file in shards.iterdir())
    source = ms_data.RemoteShards(shards.as_uri(), cache=tmp_path / "cache", block_kib=4)
    source._cache.limit_bytes = total // 4
    local = ms_data.TokenStream(shards, **SETTINGS)
    stream = ms_data.TokenStream(source, **SETTINGS)
    for _ in range(local.batches_per_epoch // 8):
        check_equal(stream, local, 8)
        used = sum(file.stat().st_size for file in (tmp_path / "cache").iterdir())
        assert used <= total // 4
    assert used > total // 8


def test_a_damaged_cache_is_read_again_and_a_damaged_store_is_named(
    shards: Path, url: str, tmp_path: Path
) -> None:
    """A flipped bit in any cached block is repaired from the store, and never reaches a batch."""
    check_equal(
        ms_data.TokenStream(remote(url, tmp_path / "cache"), **SETTINGS),
        ms_data.TokenStream(shards, **SETTINGS),
        40,
    )
    for block in (tmp_path / "cache").iterdir():
        content = bytearray(block.read_bytes())
        content[len(content) // 2] ^= 4
        block.write_bytes(content)
    check_equal(
        ms_data.TokenStream(remote(url, tmp_path / "cache"), **SETTINGS),
        ms_data.TokenStream(shards, **SETTINGS),
        40,
    )
    memory = fsspec.filesystem("memory")
    name = next(file.name for file in shards.iterdir() if file.suffix == ".msd")
    content = bytearray((shards / name).read_bytes())
    content[len(content) // 2] ^= 4
    memory.pipe_file(f"/bucket/shards/{name}", bytes(content))
    stream = ms_data.TokenStream(remote(url, tmp_path / "new"), **SETTINGS)
    with pytest.raises(DamageError, match=rf"memory://bucket/shards/{name}: frame \d+: checksum"):
        check_equal(stream, ms_data.TokenStream(shards, **SETTINGS), stream.batches_per_epoch)


class Flaky(MemoryFileSystem):
    """Answers with an error or too few bytes, two times of three."""

    protocol = "flaky"
    calls = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        """Fail two of three times."""
        Flaky.calls += 1
        if Flaky.calls % 3 == 0:
            raise ConnectionResetError("reset, key=SECRETkey")
        content: bytes = super().cat_file(path, start, end, **options)
        return content[:-1] if Flaky.calls % 3 == 1 and start is not None else content

    def find(self, *_: Any, **__: Any) -> Any:
        """Fail on any attempt to list."""
        raise AssertionError("nothing is listed")

    ls = find


def test_requests_are_repeated_and_nothing_is_listed(
    shards: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three requests fail; after the last attempt the error is one line without secrets."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr("ms_data.disk.remote.PAUSE_S", 0.0)
    source = remote(url.replace("memory", "flaky"), tmp_path / "cache", block_kib=64)
    check_equal(ms_data.TokenStream(source, **SETTINGS), ms_data.TokenStream(shards, **SETTINGS), 9)
    assert source.retries > 3
    once = remote("flaky://u:SECRETpw@bucket/shards?sig=SECRETkey", tmp_path / "x", attempts=1)
    with pytest.raises(RemoteError, match="no complete answer in 1 attempts") as raised:
        [once.fetch("index.json", 0, 10) for _ in range(3)]
    assert "SECRET" not in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "SECRET" not in f"{once} {once.path('x')}"


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("/local", {}, "must be a URL"),
        ("memory://bucket/x", {"cache_mib": 0}, "cache_mib"),
        ("nonsense://bucket/x", {}, "install the client|unknown|not known"),
    ],
)
def test_bad_settings_are_refused(
    tmp_path: Path, source: str, settings: dict[str, Any], message: str
) -> None:
    """One line each."""
    with pytest.raises(SettingError, match=message):
        ms_data.RemoteShards(source, cache=tmp_path / "c", **settings)


def test_a_missing_dataset_and_other_streams_are_refused(url: str, tmp_path: Path) -> None:
    """No index at the URL; streams of conversations read local folders."""
    with pytest.raises(SettingError, match="holds no dataset"):
        ms_data.TokenStream(remote("memory://bucket/none", tmp_path / "c"), **SETTINGS)
    with pytest.raises(SettingError, match="only TokenStream reads object stores"):
        ms_data.InstructionStream(url, sequence_length=64, batch_size=8)


@pytest.mark.slow
def test_a_faulty_s3_loses_nothing(shards: Path, tmp_path: Path) -> None:
    """Moto's S3 behind a proxy that damages a third of the answers, with every kind of fault."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        port = server.get_host_and_port()[1]
        with FaultyProxy(port, rate=0.33) as proxy:
            options = {"key": "a", "secret": "b", "endpoint_url": proxy.url}
            store = fsspec.filesystem("s3", **options)
            store.mkdir("bucket")
            for file in shards.iterdir():
                store.pipe_file(f"bucket/shards/{file.name}", file.read_bytes())
            proxy.counts.clear()
            source = remote(
                "s3://bucket/shards", tmp_path / "cache", options=options, timeout_s=2.0
            )
            local = ms_data.TokenStream(shards, **SETTINGS)
            stream = ms_data.TokenStream(source, **SETTINGS)
            count = check_equal(stream, local, local.batches_per_epoch)
            faults = {kind: proxy.counts[kind] for kind in FAULTS}
            sys.stdout.write(f"{count} values equal; faults {faults}; retries {source.retries}\n")
            assert count > 100_000
            assert min(faults.values()) >= 2
            assert proxy.counts["LIST"] == 0
    finally:
        server.stop()
    shutil.rmtree(tmp_path / "cache")
