"""Arrays of jobs and builds that are killed at any write, sync, rename or removal lose nothing."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ms_data import DedupOptions, build, clean, dedup, train_tokenizer
from ms_data.engine import batches, run

from .test_array_jobs import RULES, files_below
from .test_build import texts_of, write_lines
from .test_clean import dying_at

JOBS = ("1/2", "2/2", "merge/2")
Work = Callable[..., Any]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of some documents, a save after each, and no threads for a child to wait for."""
    monkeypatch.setattr(batches, "BATCH_CHARACTERS", 4000)
    monkeypatch.setattr(run, "SAVE_EVERY_S", 0.0)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def works(tmp_path: Path) -> dict[str, Work]:
    """Each command with its settings, for any OUT and shard; some texts come twice."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = texts_of(1, 60)
    write_lines(folder / "a.jsonl", texts)
    write_lines(folder / "b.jsonl.gz", [*texts_of(2, 20), *texts[:9]])
    tokenizer = train_tokenizer(folder, vocab_size=300)
    options = DedupOptions(substring_words=8)
    return {
        "build": lambda out, **more: build(
            folder, tokenizer=tokenizer, out=out, held_out_fraction=0.2, **more
        ),
        "clean": lambda out, **more: clean(folder, RULES, out=out, workers=1, **more),
        "dedup": lambda out, **more: dedup(folder, out=out, options=options, workers=1, **more),
    }


def array(work: Work, out: Path) -> None:
    """Both jobs and what merges them, one after the other."""
    for shard in JOBS:
        work(out, shard=shard)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", [array, lambda work, out: work(out)], ids=["array", "plain"])
@pytest.mark.parametrize("name", ["build", "clean", "dedup"])
def test_a_kill_at_any_boundary_loses_nothing(
    name: str, way: Callable[[Work, Path], None], step: int, works: dict[str, Work], tmp_path: Path
) -> None:
    """The same commands again end in the bytes of a calm run, and leave nothing beside them."""
    work, home = works[name], tmp_path / "home"
    home.mkdir()
    work(tmp_path / "calm")
    calm = files_below(tmp_path / "calm")
    event, kills = 0, 0
    while True:
        event += step
        out = home / f"out{event}"
        status = dying_at(event, lambda out=out: way(work, out))  # type: ignore[misc]
        assert status in (0, signal.SIGKILL)
        way(work, out)
        assert files_below(out) == calm, event
        assert [path.name for path in home.iterdir()] == [out.name], event
        out.rename(tmp_path / out.name)
        if not status:
            break
        kills += 1
    assert kills > 30 // step
