"""Checkpoints in object stores: published at once, resumable, and never half."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from ms_parallel import checkpoint
from ms_parallel.checkpoint_store import CheckpointStore
from ms_parallel.errors import CheckpointError, DamageError

REQUESTS = ("put_file", "pipe_file", "get_file", "cat_file", "rm_file", "info", "ls")


class Killed(BaseException):
    """The end of a process in the middle of a request."""


class Faulty(MemoryFileSystem):
    """Counts requests; kills the process at a given request, or fails two out of three."""

    protocol = "faulty"
    count, kill_at, fails, cut = 0, -1, False, False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("faulty://", "memory://"))


def faulty(name: str) -> Any:
    """A request that may fail before, after or halfway through the real one."""
    original = getattr(MemoryFileSystem, name)

    def request(self: Any, *args: Any, **kwargs: Any) -> Any:
        Faulty.count += 1
        number = Faulty.count  # a request may make others
        if Faulty.fails and number % 3:
            raise ConnectionResetError("reset, secret_key=SECRET")
        result = original(self, *args, **kwargs)
        if number == Faulty.kill_at:
            raise Killed
        return result

    return request


for _name in REQUESTS:
    setattr(Faulty, _name, faulty(_name))


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket."""
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    monkeypatch.setattr("ms_parallel.checkpoint_store.PAUSE_S", 0.0)
    Faulty.count, Faulty.kill_at, Faulty.fails = 0, -1, False
    yield "faulty://bucket/run"
    Faulty.kill_at, Faulty.fails = -1, False
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def saved(root: Path, step: int) -> Path:
    """A local checkpoint whose tensor has the step as value."""
    folder = checkpoint.step_folder(root, step)
    state = {"weight": torch.full((300,), float(step)), "count": torch.tensor(step)}
    checkpoint.save(folder, state, step=step, facts={"step": step})
    return folder


def value(folder: Path) -> float:
    """Value of the tensor of a checkpoint, whose checksums are verified."""
    state = {"weight": torch.zeros(300)}
    checkpoint.load(folder, checkpoint.read_manifest(folder), state)
    assert state["weight"].unique().numel() == 1
    return float(state["weight"][0])


def test_the_newest_checkpoint_comes_back_and_old_ones_are_deleted(
    tmp_path: Path, url: str
) -> None:
    """Equal bytes; `keep` leaves no file of older steps; a checkpoint that exists is kept."""
    store = CheckpointStore(url)
    assert store.download(tmp_path / "a") is None
    for step in (1, 2, 3):
        folder = saved(tmp_path / "run", step)
        assert store.upload(folder, keep=2) == step
    assert store.steps() == [2, 3]
    assert {path.split("/")[3][:13] for path in MemoryFileSystem.store} == {
        "step-00000002",
        "step-00000003",
    }
    downloaded = store.download(tmp_path / "b")
    assert downloaded == tmp_path / "b" / "step-00000003"
    for file in folder.iterdir():
        assert (downloaded / file.name).read_bytes() == file.read_bytes()
    assert store.download(tmp_path / "b") == downloaded
    older = store.download(tmp_path / "b", step=2)
    assert older is not None
    assert value(older) == 2.0
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9; it has \[2, 3\]"):
        store.download(tmp_path / "b", step=9)


def test_a_kill_at_any_request_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, url: str
) -> None:
    """Kill the process at each request of an upload that also deletes an old checkpoint."""
    outcomes = set()
    old, new = saved(tmp_path / "run", 1), saved(tmp_path / "run", 2)
    for number in range(1, 100):
        MemoryFileSystem.store.clear()
        CheckpointStore(url).upload(old)
        Faulty.count, Faulty.kill_at = 0, number
        try:
            CheckpointStore(url).upload(new, keep=1)
            break
        except Killed:
            Faulty.kill_at = -1
        folder = CheckpointStore(url).download(tmp_path / f"{number}")
        assert folder is not None
        outcomes.add(value(folder))
        # The next attempt completes it.
        CheckpointStore(url).upload(new, keep=1)
        assert CheckpointStore(url).steps() == [2]
    assert number > 8
    assert outcomes == {1.0, 2.0}


def test_a_killed_download_is_resumed_and_failing_requests_are_repeated(
    tmp_path: Path, url: str
) -> None:
    """Two of three requests fail; a partial folder is never taken for a checkpoint."""
    Faulty.fails = True
    store = CheckpointStore(url)
    store.upload(saved(tmp_path / "run", 4))
    Faulty.fails, Faulty.count, Faulty.kill_at = False, 0, 3
    with pytest.raises(Killed):
        store.download(tmp_path / "copy")
    assert checkpoint.complete_steps(tmp_path / "copy") == []
    Faulty.kill_at, Faulty.fails = -1, True
    folder = store.download(tmp_path / "copy")
    assert folder is not None
    assert value(folder) == 4.0
    with pytest.raises(CheckpointError, match="failed 1 times") as raised:
        [CheckpointStore(url, attempts=1).steps() for _ in range(3)]
    assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefix": "../../other"}, "names files that no checkpoint has"),
        ({"files": {"checkpoint.json": 1, "../x": 1}}, "names files that no checkpoint has"),
        ({"files": {"rank-00000.safetensors": 1}}, "names files that no checkpoint has"),
        ({"step": 7}, "names files that no checkpoint has"),
        ({"manifest_sha256": "0" * 64}, "bytes differ from the published"),
        ({"files": 3}, "json"),
    ],
)
def test_a_hostile_publication_is_refused(
    tmp_path: Path, url: str, change: dict[str, Any], message: str
) -> None:
    """Names cannot leave the prefix, and the manifest must match the published one."""
    import json

    store = CheckpointStore(url)
    store.upload(saved(tmp_path / "run", 5))
    path = "/bucket/run/step-00000005.json"
    memory = fsspec.filesystem("memory")
    memory.pipe_file(path, json.dumps({**json.loads(memory.cat_file(path)), **change}).encode())
    with pytest.raises(DamageError, match=message) as raised:
        store.download(tmp_path / "copy")
    assert "\n" not in str(raised.value)


def test_bad_urls_are_refused() -> None:
    """One line each."""
    with pytest.raises(CheckpointError, match="url must be a URL"):
        CheckpointStore("/local")
    with pytest.raises(CheckpointError, match="install the client"):
        CheckpointStore("nonsense://bucket")


@pytest.mark.slow
def test_checkpoints_survive_a_faulty_s3(tmp_path: Path) -> None:
    """Moto's S3 behind the proxy of ms-data's tests, which damages a third of the downloads."""
    from moto.server import ThreadedMotoServer

    sys.path.insert(0, str(Path(__file__).parents[2] / "ms-data" / "tests"))
    from faulty_proxy import FAULTS, FaultyProxy

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        port = server.get_host_and_port()[1]
        faults = tuple(fault for fault in FAULTS if fault != "flip")
        with FaultyProxy(port, rate=0.4, faults=faults, suffix=".safetensors") as proxy:
            options = {"key": "a", "secret": "b", "endpoint_url": proxy.url}
            fsspec.filesystem("s3", **options).mkdir("bucket")
            store = CheckpointStore("s3://bucket/run", options=options)
            for step in range(1, 9):
                store.upload(saved(tmp_path / "run", step), keep=3)
                folder = store.download(tmp_path / "copy")
                assert folder is not None
                assert value(folder) == step
            assert store.steps() == [6, 7, 8]
            assert sum(proxy.counts[fault] for fault in faults) >= 2
    finally:
        server.stop()
