"""The arrays of combinations: every key is in one, every pair is covered, and a sample runs."""

import datetime
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
sys.path.insert(0, str(FOLDER))
from axes import COMMANDS, axes_of, fixed_keys, unknown_keys  # noqa: E402
from pairwise import Array, Row  # noqa: E402

SAMPLE_S = 60
"""Seconds for rows, beside some for imports, models and data."""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_is_an_axis_or_left_out_for_a_reason(command: str) -> None:
    """A new key whose values do not follow from its type needs a line in `axes.py`."""
    assert unknown_keys(command) == []
    assert len(axes_of(command)) >= 9


def test_no_reason_is_given_for_a_key_that_is_gone() -> None:
    """Keys that are left out exist in some command."""
    import run_keys

    known = {
        row.name
        for command in COMMANDS
        for section in run_keys.commands()[command]()
        for row in section.rows
    }
    gone = {key for key in fixed_keys() if not key.endswith("*")} - known
    assert gone == set()


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
        hit = [pair for pair in bad if pair in array.pairs(row)]
        for pair in hit:
            array.refuse(pair)
        if not hit:
            array.train(row)
    possible = set()
    for values in product(*(range(size) for size in sizes)):
        whole: Row = dict(zip(axes, values, strict=True))
        if not bad & array.pairs(whole):
            possible |= array.pairs(whole)
    assert array.trained == possible
    assert array.trained | array.refused | array.impossible >= array.total
    assert not array.trained & (array.refused | array.impossible)


@pytest.mark.slow
def test_a_sample_of_combinations_trains_or_is_refused_in_one_line(tmp_path: Path) -> None:
    """Other rows each day: COMBINATIONS_SEED repeats a day's, whose number is printed."""
    today = datetime.datetime.now(tz=datetime.UTC).toordinal()
    seed = os.environ.get("COMBINATIONS_SEED", str(today))
    words = [sys.executable, "-W", "ignore", str(FOLDER / "run_arrays.py")]
    words += ["--sample", str(SAMPLE_S), "--seed", seed]
    log = tmp_path / "log"
    with log.open("w") as file:
        done = subprocess.run(words, stdout=file, stderr=file, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, f"COMBINATIONS_SEED={seed}\n{log.read_text()[-5000:]}"
