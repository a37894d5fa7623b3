"""Data ranks with different numbers of rows train the same model as equal ranks, and faster."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import (
    losses,
    train,
    write_run,
)
from processes import run_processes
from test_kill_and_resume import assert_the_same, kill_one

from ms_parallel import ConfigError
from ms_parallel.cli import main
from ms_parallel.cluster.layout import Layout
from ms_parallel.training.rows_per_rank.assignment import RowAssignment, assign_rows, step_seconds
from ms_parallel.training.rows_per_rank.setting import check_rows_per_rank

RUNS = Path(__file__).with_name("share_runs.py")
# float32 sums have a different order if other ranks have the rows: a few rounding errors.
TOLERANCE = 1e-5
EQUAL = [[4, 4]] * 6
UNEQUAL = [[5, 3], [7, 1], [2, 6], [4, 4], [1, 7], [6, 2]]


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(4, 9),
    speeds=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4),
)
def test_assigned_rows_minimize_the_step_time(rows: int, speeds: list[float]) -> None:
    """Compared with all assignments that give each rank a row and use all rows."""
    assigned = assign_rows(rows, speeds)
    candidates = itertools.product(range(1, rows + 1), repeat=len(speeds))
    best = min(step_seconds(counts, speeds) for counts in candidates if sum(counts) == rows)
    assert sum(assigned) == rows
    assert min(assigned) >= 1
    assert step_seconds(assigned, speeds) == pytest.approx(best)


def test_rows_follow_a_slow_rank_but_not_noise() -> None:
    """Speeds within 3% change nothing; half the speed halves the rows."""

    class Stream:
        shares: tuple[int, ...] = ()

        def share_out(self, shares: Any, /) -> None:
            self.shares = tuple(shares)

    class FixedTimes(RowAssignment):
        """Two data ranks with step times set by the test."""

        seconds: tuple[float, float]

        def _exchange_seconds(self, seconds: float) -> list[float]:
            return list(self.seconds)

    events: list[str] = []
    stream = Stream()
    shares = FixedTimes(
        "measured", 24, rank=0, count=2, emit=lambda event, fields: events.append(event)
    )
    shares.begin(stream)
    shares.seconds = (1.0, 1.03)
    assert not any(shares.rebalance(step, 1.0, stream) for step in range(1, 12))
    shares.seconds = (1.0, 2.0)
    assert next(step for step in range(12, 20) if shares.rebalance(step, 1.0, stream)) == 13
    assert stream.shares == shares.rows == (16, 8)
    assert events == ["shares"]
    assert shares.changed() == "rows of the data ranks by their speed: 16 (12/s), 8 (6/s)"
    shares.seconds = (1.4, 1.4)  # step times of these speeds with the new shares
    assert not any(shares.rebalance(step, 1.0, stream) for step in range(20, 40))
    shares.seconds = (1.4, 0.7)  # the slow rank has recovered, and needs half of the time
    assert next(step for step in range(40, 50) if shares.rebalance(step, 1.0, stream)) >= 40
    assert stream.shares == (12, 12)
    assert shares.slow_ranks == (1,)
    assert "data rank 1 was slow" in str(shares.report())


JOBS: list[dict[str, Any]] = [
    {"dtype": "float64", "options": {"sharding": "replicate"}},
    {"options": {"sharding": "replicate"}},
    {"options": {"sharding": "zero1"}},
    {"options": {"microbatch_size": None}},
    {"options": {"sharding": "replicate", "reproducible": True}},
]
# Sums have a different order if other ranks have the rows: a few rounding errors of a weight below
# 1 in each step, and none with a fixed order.
TOLERANCES = (1e-12, 1e-5, 1e-5, 1e-5, 0.0)


def test_unequal_shares_train_like_equal_ones() -> None:
    """With different shares in every step, also single rows, losses and weights are the same.

    In float64 to twelve digits, and bit-identical with `reproducible`.
    """
    jobs = [{"layout": "data=2", "shares": [EQUAL, UNEQUAL], **job} for job in JOBS]
    for results in run_processes(2, RUNS, "engines", jobs=jobs):
        for job, result, tolerance in zip(JOBS, results, TOLERANCES, strict=True):
            equal, unequal = result["losses"]
            assert equal == pytest.approx(unequal, abs=tolerance), job
            assert result["max_difference"] <= tolerance, job


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["auto", "replicate"])
def test_pipelines_support_unequal_shares(sharding: str) -> None:
    """Two pipelines of two stages, with different numbers of microbatches."""
    job = {
        "layout": "data=2,pipeline=2",
        "shares": [EQUAL, UNEQUAL],
        "options": {"microbatch_size": 1, "sharding": sharding},
    }
    for (result,) in run_processes(4, RUNS, "engines", jobs=[job]):
        equal, unequal = result["losses"]
        assert equal == pytest.approx(unequal, abs=1e-5)
        assert result["max_difference"] <= 1e-5


SLOW = {"0": 0.02, "1": 0.1}
"""Seconds per row that each rank sleeps."""
SETTINGS = {
    "batch_size": 12,
    "sharding": "replicate",
    "checkpoint_every": 2,
    "warmup_steps": 0,
    "final_learning_rate_ratio": 1.0,  # so that no step depends on the total number
}


def train_on_two_ranks(
    shards: Path, output: Path, steps: int, **settings: Any
) -> list[dict[str, Any]]:
    """Results of two data ranks; one is slower per row."""
    return run_processes(
        2,
        RUNS,
        "train_with_shares",
        corpus=str(shards),
        output=str(output),
        steps=steps,
        **{"slow": SLOW, **SETTINGS, **settings},
    )


def test_a_slow_rank_gets_fewer_rows_and_is_named(shards: Path, tmp_path: Path) -> None:
    """Losses are as with equal shares, and a resumed run starts with the last shares."""
    equal, _ = train_on_two_ranks(shards, tmp_path / "equal", 8)
    measured, other = train_on_two_ranks(shards, tmp_path / "measured", 6, shares="measured")
    change = measured["changes"][0]
    assert change["step"] == 5
    assert change["rows.0"] + change["rows.1"] == 12
    assert change["rows.0"] > change["rows.1"]
    assert change["rows_per_s.0"] > 1.2 * change["rows_per_s.1"]
    assert measured["slow"] == other["slow"] == [1]
    assert measured["shares"] == other["shares"] == [change["rows.0"], change["rows.1"]]
    resumed, _ = train_on_two_ranks(shards, tmp_path / "measured", 8, shares="measured")
    assert resumed["shares"] == measured["shares"]
    assert measured["losses"] + resumed["losses"] == pytest.approx(equal["losses"], rel=TOLERANCE)


def test_a_slow_rank_is_detected_if_others_wait_for_it(shards: Path, tmp_path: Path) -> None:
    """Under zero1 both ranks finish together, so only computations without waiting are timed."""
    settings = {"sharding": "zero1", "microbatch_size": 1, "shares": "measured"}
    result, _ = train_on_two_ranks(shards, tmp_path, 5, **settings)
    assert result["slow"] == [1]
    assert result["shares"][0] > result["shares"][1]


def test_a_killed_run_of_unequal_shares_ends_bit_identical(shards: Path, tmp_path: Path) -> None:
    """Killed in a checkpoint and started again, it neither loses nor repeats a row."""
    settings: dict[str, Any] = {"shares": [3, 1], "microbatch_size": 1, "sharding": "zero1"}
    uninterrupted, run = (
        write_run(tmp_path / name, shards, **settings) for name in ("a.toml", "b.toml")
    )
    assert train(uninterrupted, 2).returncode == 0
    kill_one(run, 2, "checkpoint", random.Random(3))
    result = train(run, 2)
    assert result.returncode == 0, result.stderr
    assert_the_same(run, uninterrupted)
    equal = write_run(tmp_path / "c.toml", shards, sharding="zero1")
    assert train(equal, 1).returncode == 0
    assert losses(run) == pytest.approx(losses(equal), rel=TOLERANCE)


@pytest.mark.slow
def test_a_killed_run_of_measured_shares_ends_bit_identical(shards: Path, tmp_path: Path) -> None:
    """With `reproducible`, bits equal one process's for any speeds."""
    settings: dict[str, Any] = {"shares": "measured", "sharding": "replicate", "reproducible": True}
    run = write_run(tmp_path / "run.toml", shards, **settings)
    kill_one(run, 2, "checkpoint", random.Random(3))
    result = train(run, 2)
    assert result.returncode == 0, result.stderr
    single = write_run(tmp_path / "alone.toml", shards, reproducible=True)
    assert train(single, 1).returncode == 0
    assert_the_same(run, single)


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({"shares": (8, 3)}, {"data": 2}, "must sum to batch_size=12, got 11;"),
        ({"shares": (4, 4, 4)}, {"data": 2}, "rows for each of 2 data ranks, got 3 numbers"),
        ({"shares": "measured"}, {"data": 2}, "gathers weights per microbatch .sharding='auto'."),
        (
            {"shares": "measured", "sharding": "zero1"},
            {"data": 2},
            "has one microbatch and so waits for the others; set sharding to 'replicate'",
        ),
        (
            {"shares": (8, 4), "microbatch_size": 2},
            {"data": 2},
            "different numbers of microbatches, but they exchange",
        ),
        (
            {"shares": (8, 4), "sharding": "zero1", "fixed_schedule": True},
            {"data": 2, "pipeline": 2},
            "use a named schedule such as 1f1b",
        ),
    ],
)
def test_invalid_shares_are_refused_by_name(
    changes: dict[str, Any], layout: dict[str, int], message: str
) -> None:
    """With the remedy, before anything starts."""
    defaults = {
        "batch_size": 12,
        "microbatch_size": None,
        "sharding": "auto",
        "fixed_schedule": False,
    }
    settings = {**defaults, **changes}
    with pytest.raises(ConfigError, match=message):
        check_rows_per_rank(settings.pop("shares"), Layout(**layout), **settings)


@pytest.mark.parametrize("value", ["fast", 3, [0, 4], [2.5, 1.5], []])
def test_an_invalid_shares_setting_gives_a_one_line_error(
    value: Any, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and the valid values of `shares`."""
    run = write_run(tmp_path / "run.toml", shards, shares=value)
    assert main(["train", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "must be 'equal', 'measured' or a list of rows per data rank" in line


@pytest.mark.slow
def test_measured_shares_use_the_speed_of_all_ranks(shards: Path, tmp_path: Path) -> None:
    """Both reach 0.93 of the sum of their speeds; equal shares reach at most 0.7."""
    seconds = {}
    for shares in ("equal", "measured"):
        results = train_on_two_ranks(
            shards,
            tmp_path / shares,
            30,
            shares=shares,
            slow={"0": 0.04, "1": 0.08},
            batch_size=24,
            checkpoint_every=None,
        )
        seconds[shares] = sorted(results[0]["step seconds"][-12:])[6]
    ideal = 1 / 0.04 + 1 / 0.08  # rows per second, ignoring the model's own time, which is short
    assert 24 / seconds["measured"] >= 0.93 * ideal
    assert 24 / seconds["equal"] <= 0.7 * ideal
