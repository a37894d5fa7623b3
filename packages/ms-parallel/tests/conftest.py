"""Fixtures: text and shards that whole runs train on."""

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
from launching import write_corpus, write_run

from ms_parallel.cli import main

# A test case may take longer than hypothesis allows when the machine is busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw text, written once per module."""
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def shards(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards built by one short run."""
    run = write_run(tmp_path_factory.mktemp("build") / "run.toml", corpus, steps=1)
    assert main(["train", str(run)]) == 0
    return run.with_suffix("") / "shards"


@pytest.fixture
def no_process_group() -> None:
    """Destroy the single-process group that earlier tests of engines created.

    In a group, predictions and plans run in a new interpreter, which takes seconds.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
