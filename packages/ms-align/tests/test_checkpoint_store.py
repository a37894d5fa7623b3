"""Runs that keep their checkpoints in an object store and resume from it on a fresh machine."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ms_align.errors import CheckpointError, ConfigError
from ms_align.run import checkpoint
from ms_align.run.checkpoint import RunStore
from ms_align.run.options import RunOptions

from .test_online import PROMPTS, PPOTrainer, events, settings

STORE = "memory://bucket/run"
MODEL = Path("model", "model.safetensors")


@pytest.fixture
def _empty_store() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.mark.usefixtures("_empty_store")
def test_a_run_resumes_on_a_fresh_machine_bit_for_bit(tmp_path: Path) -> None:
    """Two updates here and two there; then a damaged local copy is replaced by the store's."""
    every: dict[str, Any] = {"checkpoint_every": 1, "keep_checkpoints": 1}
    PPOTrainer(**settings(tmp_path / "reference", steps=4, **every)).optimize(PROMPTS)
    every["checkpoint_store"] = STORE
    PPOTrainer(**settings(tmp_path / "a", steps=2, **every)).optimize(PROMPTS)
    assert events(tmp_path / "a", "upload")[-1]["step"] == 2
    assert RunStore(STORE).steps() == checkpoint.complete_steps(tmp_path / "a/checkpoints") == [2]
    PPOTrainer(**settings(tmp_path / "b", steps=4, **every)).optimize(PROMPTS)
    assert events(tmp_path / "b", "download")[0]["step"] == 2
    assert events(tmp_path / "b", "resume")[0]["step"] == 2
    reference = (tmp_path / "reference" / MODEL).read_bytes()
    assert (tmp_path / "b" / MODEL).read_bytes() == reference
    weights = tmp_path / "b" / "checkpoints" / "step-00000004" / "rank-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    shutil.rmtree(tmp_path / "b" / "model")
    PPOTrainer(**settings(tmp_path / "b", steps=4, **every)).optimize(PROMPTS)
    assert [event["step"] for event in events(tmp_path / "b", "download")] == [2, 4]
    assert (tmp_path / "b" / MODEL).read_bytes() == reference


@pytest.mark.usefixtures("_empty_store")
def test_a_store_that_fails_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is written, the run ends with an error, and the next launch uploads."""
    monkeypatch.setattr("ms_align.checkpoint_store.PAUSE_S", 0.0)
    run = settings(tmp_path, steps=1, checkpoint_store=STORE)

    def fail(self: Any, *_: Any, **__: Any) -> None:
        raise ConnectionResetError("reset, secret_key=SECRET")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", fail)
        with pytest.raises(CheckpointError, match="same command uploads it") as raised:
            PPOTrainer(**run).optimize(PROMPTS)
    assert "SECRET" not in str(raised.value)
    assert "SECRET" not in str(events(tmp_path, "upload_failed"))
    assert (tmp_path / MODEL).is_file()
    PPOTrainer(**settings(tmp_path, steps=1, checkpoint_store=STORE)).optimize(PROMPTS)
    assert RunStore(STORE).steps() == [1]


def test_a_url_with_credentials_is_refused() -> None:
    """The message does not repeat them."""
    with pytest.raises(ConfigError, match="set credentials in the environment") as raised:
        RunOptions(checkpoint_store="s3://key:hidden@bucket/run")
    assert "hidden" not in str(raised.value)
