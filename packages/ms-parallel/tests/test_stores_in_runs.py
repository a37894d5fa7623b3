"""Runs that read shards from an object store and keep their checkpoints in one."""

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from launching import (
    MODEL,
    RUN,
    events,
    losses,
    run_of,
    train,
    training,
    wait_for,
    weights,
    write_run,
)

from ms_parallel import DistributedTrainer
from ms_parallel.checkpoint import CheckpointStore, complete_steps
from ms_parallel.errors import CheckpointError, ConfigError

STORE = "memory://bucket/run"


@pytest.fixture
def remote_shards(shards: Path) -> Iterator[str]:
    """The shards in fsspec's memory file system."""
    memory = fsspec.filesystem("memory")
    for file in shards.iterdir():
        memory.pipe_file(f"/bucket/shards/{file.name}", file.read_bytes())
    yield "memory://bucket/shards"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def run_in_process(output: Path, dataset: Any, steps: int, **settings: Any) -> list[dict[str, Any]]:
    """Train in this process and return the events, each with its `kind`."""
    recorded: list[dict[str, Any]] = []
    defaults = {**run_of(dataset), "model_config": MODEL, "output_dir": output, "progress": False}
    del defaults["steps"]
    trainer = DistributedTrainer(
        **{**defaults, **settings},
        on_event=lambda kind, fields: recorded.append({"kind": kind, **fields}),
    )
    trainer.train(dataset, steps=steps)
    return recorded


def step_losses(recorded: list[dict[str, Any]]) -> dict[int, float]:
    """Loss by step."""
    return {event["step"]: event["loss"] for event in recorded if event["kind"] == "step"}


def of_kind(recorded: list[dict[str, Any]], kind: str) -> list[int]:
    """Steps of the events of a kind."""
    return [event["step"] for event in recorded if event["kind"] == kind]


def test_a_run_moves_to_a_fresh_machine_and_equals_a_local_run(
    shards: Path, remote_shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same losses and model bytes; the upload of step 2 is held back until step 5 is taken."""
    step_5 = threading.Event()
    put_file = MemoryFileSystem.put_file

    def held_back(self: Any, source: str, target: str, **options: Any) -> Any:
        if "step-00000002" in source:
            assert step_5.wait(60)
        return put_file(self, source, target, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", held_back)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    local = run_in_process(tmp_path / "local", shards, 8, checkpoint_every=2)
    settings: dict[str, Any] = {
        "checkpoint_store": STORE, "checkpoint_every": 2, "keep_checkpoints": 1,
    }  # fmt: skip
    recorded: list[dict[str, Any]] = []

    def note(kind: str, fields: Any) -> None:
        recorded.append({"kind": kind, **fields})
        if kind == "step" and fields["step"] == 5:
            # Kept for the upload, although one checkpoint is kept and there are two newer.
            assert complete_steps(tmp_path / "first" / "checkpoints") == [2, 4]
            step_5.set()

    defaults = {**run_of(remote_shards), "model_config": MODEL, "progress": False, **settings}
    del defaults["steps"]
    trainer = DistributedTrainer(**defaults, output_dir=tmp_path / "first", on_event=note)
    trainer.train(remote_shards, steps=6)
    assert of_kind(recorded, "upload")[0] == 2
    assert of_kind(recorded, "upload")[-1] == 6
    assert CheckpointStore(STORE).steps() == [6]
    assert complete_steps(tmp_path / "first" / "checkpoints") == [6]
    assert not list((tmp_path / "first").rglob("*.msd"))
    moved = run_in_process(tmp_path / "second", remote_shards, 8, **settings)
    assert of_kind(moved, "download") == of_kind(moved, "resume") == [6]
    together = {**step_losses(recorded), **step_losses(moved)}
    # The schedule of the learning rate differs after 6 steps of a run of 6 steps.
    assert together.keys() == step_losses(local).keys()
    assert together[1] == step_losses(local)[1]
    assert len(step_losses(moved)) == 2
    again = run_in_process(tmp_path / "third", shards, 8, **settings)
    assert of_kind(again, "resume") == [8]
    files = [
        (tmp_path / name / "model" / "model.safetensors").read_bytes()
        for name in ("second", "third")
    ]
    assert files[0] == files[1]


def test_a_store_that_fails_costs_no_step_and_the_command_fails_at_the_end(
    remote_shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is written; the next launch uploads the checkpoint; the secret is masked."""
    monkeypatch.setattr("ms_parallel.checkpoint_store.PAUSE_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = {"checkpoint_store": STORE, "checkpoint_every": 2}

    def fail(self: Any, *_: Any, **__: Any) -> None:
        raise ConnectionResetError("reset, secret_key=SECRET")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", fail)
        with pytest.raises(CheckpointError, match="same command uploads it") as raised:
            run_in_process(tmp_path / "run", remote_shards, 4, **settings)
    assert "SECRET" not in str(raised.value)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert CheckpointStore(STORE).steps() == []
    recorded = run_in_process(tmp_path / "run", remote_shards, 4, **settings)
    assert of_kind(recorded, "upload") == CheckpointStore(STORE).steps() == [4]


@pytest.mark.parametrize(
    "url", ["s3://key:secret@bucket/run", "s3://bucket/run?secret=1", "bucket/run"]
)
def test_urls_with_credentials_are_refused(url: str, tmp_path: Path) -> None:
    """They would be recorded in run.json; the message does not repeat them."""
    with pytest.raises(ConfigError, match="set credentials in the environment") as raised:
        run_in_process(tmp_path / "run", tmp_path, 1, checkpoint_store=url)
    assert "secret" not in str(raised.value)
    if "://" in url:
        with pytest.raises(ConfigError, match="dataset must be a URL") as raised:
            run_in_process(tmp_path / "run", url, 1)
        assert "secret" not in str(raised.value)
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_killed_uploads_to_a_faulty_s3_lose_nothing(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Two ranks read and save through the proxy; kill -9 in an upload, then another machine."""
    from moto.server import ThreadedMotoServer

    sys.path.insert(0, str(Path(__file__).parents[2] / "ms-data" / "tests"))
    from faulty_proxy import FAULTS, FaultyProxy

    undisturbed = write_run(tmp_path / "undisturbed.toml", shards)
    assert train(undisturbed, 2).returncode == 0
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        port = server.get_host_and_port()[1]
        faults = tuple(fault for fault in FAULTS if fault != "stall")
        with FaultyProxy(port, rate=0.3, faults=faults, suffix=".") as proxy:
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEYOFTHETEST")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRETOFTHETEST")
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
            bucket = f"s3://bucket{int(background)}"
            direct = fsspec.filesystem("s3", endpoint_url=f"http://127.0.0.1:{port}")
            direct.mkdir(bucket)
            direct.put(str(shards), f"{bucket}/shards", recursive=True)
            settings = {
                "checkpoint_store": f"{bucket}/run", "async_checkpoints": background,
                "dataset_path": f"{bucket}/shards",
            }  # fmt: skip

            def machine(name: str) -> Path:
                return write_run(tmp_path / f"{name}.toml", shards, **settings)

            def uploading() -> bool:
                direct.invalidate_cache()
                return any(direct.find(f"{bucket}/run/"))

            with training(machine("a"), 2) as started:
                wait_for(uploading, started)
                os.kill(started.pid, signal.SIGKILL)
                started.wait(timeout=120)
            shutil.rmtree(tmp_path / "a")
            result = train(machine("b"), 2)
            assert result.returncode == 0, result.stderr
            # The same folder of a third machine has nothing but the store.
            third = machine("c")
            assert train(third, 2).returncode == 0
            assert events(third, "resume")[0]["step"] == RUN["steps"]
            assert weights(third) == weights(undisturbed)
            numbers = {**losses(machine("b"))}
            assert numbers.items() <= losses(undisturbed).items()
            # Explicit, as fsspec reuses a client of the process with the same arguments.
            options = {"endpoint_url": f"http://127.0.0.1:{port}"}
            assert CheckpointStore(f"{bucket}/run", options=options).steps() == [6, 9, 12]
            assert sum(proxy.counts[fault] for fault in faults) >= 5
        for file in tmp_path.rglob("*"):
            if file.is_file():
                content = file.read_bytes()
                assert b"SECRETOFTHETEST" not in content, file
                assert b"KEYOFTHETEST" not in content, file
        assert json.loads((tmp_path / "b" / "run.json").read_text())
    finally:
        server.stop()
