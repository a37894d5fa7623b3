"""Covering arrays of settings: every key is in one, every pair is covered, and a sample runs."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "combinations"
sys.path[:0] = [str(FOLDER), str(ROOT / "tests"), str(ROOT / "docs" / "extensions")]
from axes import (  # noqa: E402
    COMMANDS,
    OTHER_COMMANDS,
    axes_of,
    fixed_keys,
    package_of,
    unknown_keys,
)
from pairwise import Array, Row  # noqa: E402
from refused_page import refused_rows  # noqa: E402
from run_arrays import (  # noqa: E402
    PAGE,
    Progress,
    classify,
    minimal,
    read_progress,
    read_refused,
    write_progress,
)

SAMPLE_S = 18
"""Seconds in which rows start; imports, inputs and the last rows take the same time again."""


def test_every_command_with_a_run_file_has_an_array_or_a_reason() -> None:
    """A new command needs an array, or a line in `OTHER_COMMANDS`."""
    import run_keys

    assert set(COMMANDS) | set(OTHER_COMMANDS) == set(run_keys.commands())
    assert not set(COMMANDS) & set(OTHER_COMMANDS)


@pytest.mark.parametrize("package", sorted({package_of(command) for command in COMMANDS}))
def test_the_page_has_every_recorded_refusal(package: str) -> None:
    """One row per reason keeps the page within 250 lines."""
    commands = [command for command in COMMANDS if package_of(command) == package]
    lines = PAGE.read_text().splitlines()
    assert len(lines) <= 250
    assert set(refused_rows({command: read_refused(command) for command in commands})) <= set(lines)


@pytest.mark.parametrize("command", COMMANDS)
def test_all_choices_of_a_key_are_tested(command: str) -> None:
    """Choices and names of registries come from the options, so a new one is tested at once."""
    import run_keys

    axes = axes_of(command)
    for section in run_keys.commands()[command]():
        for row in section.rows:
            choices = {word.strip("` ") for word in row.accepted.split(",") if "`" in word}
            if choices and row.name in axes:
                assert choices <= set(map(str, axes[row.name])), row.name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_is_an_axis_or_excluded_with_a_reason(command: str) -> None:
    """A new key whose values do not follow from its type needs a line in `axes.py`."""
    assert unknown_keys(command) == []
    assert len(axes_of(command)) >= 9


def test_excluded_keys_exist() -> None:
    """Each key in `FIXED` belongs to some command."""
    import run_keys

    existing = {
        row.name
        for command in COMMANDS
        for section in run_keys.commands()[command]()
        for row in section.rows
    }
    removed = {key for key in fixed_keys() if not key.endswith("*")} - existing
    assert removed == set()


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=7),
    refused=st.sets(st.integers(0, 10**6), max_size=4),
    seed=st.integers(0, 100),
)
def test_every_pair_is_covered_refused_or_impossible(
    sizes: list[int], refused: set[int], seed: int
) -> None:
    """Compare with all rows, counted by brute force; refusals are learned while it runs."""
    axes = {f"axis {i}": size for i, size in enumerate(sizes)}
    array = Array(axes, seed=seed)
    pairs = sorted(array.total)
    bad = {pairs[number % len(pairs)] for number in refused}
    while (row := array.next()) is not None:
        array.release(row)
        hit = [pair for pair in bad if pair in array.pairs(row)]
        for pair in hit:
            array.refuse(pair)
        if not hit:
            array.train(row)
    possible = set()
    for values in product(*(range(size) for size in sizes)):
        complete: Row = dict(zip(axes, values, strict=True))
        if not bad & array.pairs(complete):
            possible |= array.pairs(complete)
    assert array.trained == possible
    assert array.trained | array.refused | array.impossible >= array.total
    assert not array.trained & (array.refused | array.impossible)


@given(
    sizes=st.lists(st.integers(2, 4), min_size=3, max_size=5),
    numbers=st.sets(st.integers(0, 10**6), min_size=1, max_size=2),
    seed=st.integers(0, 100),
)
@settings(max_examples=20, deadline=None)
def test_pairs_of_failing_rows_stay_uncovered(
    sizes: list[int], numbers: set[int], seed: int
) -> None:
    """A pair is covered if and only if a row without a failing combination contains it."""
    axes = {f"axis {i}": size for i, size in enumerate(sizes)}
    array = Array(axes, seed=seed)
    pairs = sorted(array.total)
    failing = {pairs[number % len(pairs)] for number in numbers}
    while (row := array.next()) is not None:
        array.release(row)
        hit = failing & array.pairs(row)
        array.failed |= hit
        if not hit:
            array.train(row)
    rows = (dict(zip(axes, values, strict=True)) for values in product(*map(range, sizes)))
    passing = [array.pairs(row) for row in rows if not failing & array.pairs(row)]
    assert array.trained == set().union(*passing)
    assert array.uncovered() == array.total - array.trained
    assert failing <= array.uncovered()


def test_rows_that_run_at_once_cover_different_pairs() -> None:
    """Reserved pairs reopen when their row ends without training."""
    array = Array({"a": 3, "b": 3, "c": 2})
    first, second = array.next(), array.next()
    assert first is not None
    assert second is not None
    assert array.pairs(second) - array.pairs(first)
    array.release(first)
    assert array.pairs(first) <= array.open


@given(
    items=st.lists(st.integers(0, 30).map(str), unique=True, min_size=1, max_size=12),
    data=st.data(),
)
def test_the_cause_of_a_result_is_minimal(items: list[str], data: st.DataObject) -> None:
    """Any subset of the settings may be the cause."""
    cause = set(data.draw(st.lists(st.sampled_from(items), max_size=3)))
    assert set(minimal(items, lambda few: cause <= set(few))) == cause


def test_progress_survives_a_round_trip(tmp_path: Path) -> None:
    """Progress of other axes is ignored."""
    command = "ms-compress prune"
    row = dict.fromkeys(axes_of(command), 0)
    pair = tuple(sorted(row.items())[:2])
    progress = Progress(rows=(row,), refused={pair: "why"}, confirmed=frozenset({pair}), runs=3)
    write_progress(command, tmp_path / "saved", progress)
    assert read_progress(command, tmp_path / "saved") == progress
    assert read_progress("ms-compress distill", tmp_path / "saved") == Progress()


def test_a_failure_is_one_of_exit_code_lines_or_losses(tmp_path: Path) -> None:
    """A refusal is exit code 2 on every rank, one line in total, and no step."""
    line, events = "ms-align: model must be a folder\n", tmp_path / "events.jsonl"

    def kind(codes: list[int], errors: list[str]) -> str:
        return classify("ms-align sft", codes, errors, events).kind

    assert kind([2, 2], [line, ""]) == "refused"
    assert kind([2, 2], [line, line]) == "failed"
    assert kind([2, 0], [line, ""]) == "failed"
    assert kind([2, 2], ["", ""]) == "failed"
    assert kind([0], [""]) == "failed"
    events.write_text('{"kind":"step","step":1,"loss":2.0}\n')
    assert kind([0], [""]) == "trained"
    assert kind([2], [line]) == "failed"
    events.write_text('{"kind":"step","step":1,"loss":NaN}\n')
    assert kind([0], [""]) == "failed"


def test_a_sample_of_combinations_trains_or_is_refused_in_one_line(tmp_path: Path) -> None:
    """Each commit samples other rows of the commands whose arrays are complete.

    COMBINATIONS_SEED repeats the rows of a commit that failed.
    """
    coverage = json.loads((FOLDER / "coverage.json").read_text())
    commands = [
        command
        for command, counts in coverage.items()
        if counts["covered"] == counts["pairs"] and not counts["failed"]
    ]
    assert "ms-parallel train" in commands
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    seed = os.environ.get("COMBINATIONS_SEED", str(int(commit.stdout[:8] or "0", 16)))
    arguments = [sys.executable, "-W", "ignore", str(FOLDER / "run_arrays.py")]
    arguments += ["--sample", str(SAMPLE_S), "--seed", seed, *commands]
    log = tmp_path / "log"
    with log.open("w") as file:
        result = subprocess.run(arguments, stdout=file, stderr=file, cwd=tmp_path, timeout=900)
    assert result.returncode == 0, f"COMBINATIONS_SEED={seed}\n{log.read_text()[-5000:]}"
