"""Builds and array jobs killed at any write, sync, rename or removal lose nothing."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ms_data import DedupOptions, build, clean, dedup, train_tokenizer
from ms_data.engine import batches, run

from .test_array_jobs import RULES, read_tree
from .test_build import random_texts, write_lines
from .test_clean import run_and_die_at

JOBS = ("1/2", "2/2", "merge/2")
Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small batches, save after each, and run no tokenizer threads, which hang forks."""
    monkeypatch.setattr(batches, "BATCH_CHARACTERS", 4000)
    monkeypatch.setattr(run, "SAVE_EVERY_S", 0.0)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, Command]:
    """Map each command to a call that takes an output folder and a shard. Some texts repeat."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = random_texts(1, 60)
    write_lines(folder / "a.jsonl", texts)
    write_lines(folder / "b.jsonl.gz", [*random_texts(2, 20), *texts[:9]])
    tokenizer = train_tokenizer(folder, vocab_size=300)
    options = DedupOptions(substring_words=8)
    return {
        "build": lambda out, **extra: build(
            folder, tokenizer=tokenizer, out=out, held_out_fraction=0.2, **extra
        ),
        "clean": lambda out, **extra: clean(folder, RULES, out=out, workers=1, **extra),
        "dedup": lambda out, **extra: dedup(folder, out=out, options=options, workers=1, **extra),
    }


def run_array(work: Command, out: Path) -> None:
    """Run both jobs and the merge."""
    for shard in JOBS:
        work(out, shard=shard)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "run_command", [run_array, lambda command, out: command(out)], ids=["array", "plain"]
)
@pytest.mark.parametrize("name", ["build", "clean", "dedup"])
def test_a_command_killed_at_any_call_resumes_to_identical_bytes(
    name: str,
    run_command: Callable[[Command, Path], None],
    step: int,
    commands: dict[str, Command],
    tmp_path: Path,
) -> None:
    """No other files are left."""
    work, output_root = commands[name], tmp_path / "home"
    output_root.mkdir()
    work(tmp_path / "reference")
    expected = read_tree(tmp_path / "reference")
    event, kills = 0, 0
    while True:
        event += step
        out = output_root / f"out{event}"
        status = run_and_die_at(event, lambda out=out: run_command(work, out))  # type: ignore[misc]
        assert status in (0, signal.SIGKILL)
        run_command(work, out)
        assert read_tree(out) == expected, event
        assert [path.name for path in output_root.iterdir()] == [out.name], event
        out.rename(tmp_path / out.name)
        if not status:
            break
        kills += 1
    assert kills > 30 // step
