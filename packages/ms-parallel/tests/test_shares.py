"""Data ranks that take unequal shares of a batch train what equal shares train, and faster."""

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
# Sums in float32 come in another order where other ranks have the rows: a few rounding errors.
TOLERANCE = 1e-5
EQUAL = [[4, 4]] * 6
UNEQUAL = [[5, 3], [7, 1], [2, 6], [4, 4], [1, 7], [6, 2]]


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(4, 9),
    speeds=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4),
)
def test_no_other_shares_end_earlier(rows: int, speeds: list[float]) -> None:
    """By trying all; each rank has a row, and all rows are given."""
    found = assign_rows(rows, speeds)
    every = itertools.product(range(1, rows + 1), repeat=len(speeds))
    best = min(step_seconds(each, speeds) for each in every if sum(each) == rows)
    assert sum(found) == rows
    assert min(found) >= 1
    assert step_seconds(found, speeds) == pytest.approx(best)


def test_noise_moves_no_shares_and_a_slow_rank_does() -> None:
    """Speeds 3% apart leave what there is; half the speed halves the rows."""

    class Stream:
        given: tuple[int, ...] = ()

        def share_out(self, shares: Any, /) -> None:
            self.given = tuple(shares)

    class Told(RowAssignment):
        """Two data ranks whose seconds the test says."""

        seconds: tuple[float, float]

        def _exchange_seconds(self, seconds: float) -> list[float]:
            return list(self.seconds)

    told: list[str] = []
    stream = Stream()
    shares = Told("measured", 24, rank=0, count=2, emit=lambda kind, fields: told.append(kind))
    shares.begin(stream)
    shares.seconds = (1.0, 1.03)
    assert not any(shares.rebalance(step, 1.0, stream) for step in range(1, 12))
    shares.seconds = (1.0, 2.0)
    assert next(step for step in range(12, 20) if shares.rebalance(step, 1.0, stream)) == 13
    assert stream.given == shares.rows == (16, 8)
    assert told == ["shares"]
    assert shares.changed() == "rows of the data ranks by their speed: 16 (12/s), 8 (6/s)"
    shares.seconds = (1.4, 1.4)  # what these speeds make of the new shares
    assert not any(shares.rebalance(step, 1.0, stream) for step in range(20, 40))
    shares.seconds = (1.4, 0.7)  # the slow rank has recovered, and takes half of the rows' time
    assert next(step for step in range(40, 50) if shares.rebalance(step, 1.0, stream)) >= 40
    assert stream.given == (12, 12)
    assert shares.slow_ranks == (1,)
    assert "data rank 1 was slow" in str(shares.report())


JOBS: list[dict[str, Any]] = [
    {"dtype": "float64", "options": {"sharding": "replicate"}},
    {"options": {"sharding": "replicate"}},
    {"options": {"sharding": "zero1"}},
    {"options": {"microbatch_size": None}},
    {"options": {"sharding": "replicate", "reproducible": True}},
]
# Sums come in another order where other ranks have the rows: a few rounding errors of a weight
# below 1 each step, and none where the order is fixed.
APART = (1e-12, 1e-5, 1e-5, 1e-5, 0.0)


def test_unequal_shares_train_what_equal_ones_do() -> None:
    """Other shares in every step, some of a single row: losses and weights are the same.

    In float64 to twelve digits, and to the bit where runs are to be reproducible.
    """
    jobs = [{"layout": "data=2", "shares": [EQUAL, UNEQUAL], **job} for job in JOBS]
    for found in run_processes(2, RUNS, "engines", jobs=jobs):
        for job, each, most in zip(JOBS, found, APART, strict=True):
            equal, unequal = each["losses"]
            assert equal == pytest.approx(unequal, abs=most), job
            assert each["apart"] <= most, job


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["auto", "replicate"])
def test_pipelines_take_unequal_shares_too(sharding: str) -> None:
    """Two pipelines of two stages, which pass other numbers of microbatches."""
    job = {
        "layout": "data=2,pipeline=2",
        "shares": [EQUAL, UNEQUAL],
        "options": {"microbatch_size": 1, "sharding": sharding},
    }
    for (found,) in run_processes(4, RUNS, "engines", jobs=[job]):
        equal, unequal = found["losses"]
        assert equal == pytest.approx(unequal, abs=1e-5)
        assert found["apart"] <= 1e-5


SLOW = {"0": 0.02, "1": 0.1}
"""Seconds that each rank waits for each of its rows."""
SETTINGS = {
    "batch_size": 12,
    "sharding": "replicate",
    "checkpoint_every": 2,
    "warmup_steps": 0,
    "final_learning_rate_ratio": 1.0,  # so that no step depends on how many there will be
}


def trained(shards: Path, output: Path, steps: int, **settings: Any) -> list[dict[str, Any]]:
    """What two data ranks find, one of which is three times as slow as the other."""
    return run_processes(
        2,
        RUNS,
        "trained",
        corpus=str(shards),
        output=str(output),
        steps=steps,
        **{"slow": SLOW, **SETTINGS, **settings},
    )


def test_a_slow_rank_gets_fewer_rows_and_is_named(shards: Path, tmp_path: Path) -> None:
    """Losses are those of equal shares; a run that goes on begins with the shares it had."""
    equal, _ = trained(shards, tmp_path / "equal", 8)
    measured, other = trained(shards, tmp_path / "measured", 6, shares="measured")
    change = measured["changes"][0]
    assert change["step"] == 5
    assert change["rows.0"] + change["rows.1"] == 12
    assert change["rows.0"] > change["rows.1"]
    assert change["rows_per_s.0"] > 1.2 * change["rows_per_s.1"]
    assert measured["slow"] == other["slow"] == [1]
    assert measured["shares"] == other["shares"] == [change["rows.0"], change["rows.1"]]
    again, _ = trained(shards, tmp_path / "measured", 8, shares="measured")
    assert again["shares"] == measured["shares"]
    assert measured["losses"] + again["losses"] == pytest.approx(equal["losses"], rel=TOLERANCE)


def test_a_slow_rank_is_seen_beside_one_that_waits_for_it(shards: Path, tmp_path: Path) -> None:
    """Under zero1 both end at once: what is timed are the computations that wait for nobody."""
    settings = {"sharding": "zero1", "microbatch_size": 1, "shares": "measured"}
    found, _ = trained(shards, tmp_path, 5, **settings)
    assert found["slow"] == [1]
    assert found["shares"][0] > found["shares"][1]


def test_a_killed_run_of_unequal_shares_ends_bit_identical(shards: Path, tmp_path: Path) -> None:
    """Kill -9 in a checkpoint, then the same command: no row is lost and none comes twice."""
    settings: dict[str, Any] = {"shares": [3, 1], "microbatch_size": 1, "sharding": "zero1"}
    whole, run = (write_run(tmp_path / name, shards, **settings) for name in ("a.toml", "b.toml"))
    assert train(whole, 2).returncode == 0
    kill_one(run, 2, "checkpoint", random.Random(3))
    done = train(run, 2)
    assert done.returncode == 0, done.stderr
    assert_the_same(run, whole)
    equal = write_run(tmp_path / "c.toml", shards, sharding="zero1")
    assert train(equal, 1).returncode == 0
    assert losses(run) == pytest.approx(losses(equal), rel=TOLERANCE)


@pytest.mark.slow
def test_a_killed_run_of_measured_shares_ends_bit_identical(shards: Path, tmp_path: Path) -> None:
    """Whatever the speeds were: with `reproducible` as one process to the bit."""
    settings: dict[str, Any] = {"shares": "measured", "sharding": "replicate", "reproducible": True}
    run = write_run(tmp_path / "run.toml", shards, **settings)
    kill_one(run, 2, "checkpoint", random.Random(3))
    done = train(run, 2)
    assert done.returncode == 0, done.stderr
    alone = write_run(tmp_path / "alone.toml", shards, reproducible=True)
    assert train(alone, 1).returncode == 0
    assert_the_same(run, alone)


@pytest.mark.parametrize(
    ("given", "layout", "said"),
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
def test_shares_that_cannot_be_are_refused_by_name(
    given: dict[str, Any], layout: dict[str, int], said: str
) -> None:
    """With the remedy, before anything is started."""
    usual = {"batch_size": 12, "microbatch_size": None, "sharding": "auto", "fixed_schedule": False}
    settings = {**usual, **given}
    with pytest.raises(ConfigError, match=said):
        check_rows_per_rank(settings.pop("shares"), Layout(**layout), **settings)


@pytest.mark.parametrize("value", ["fast", 3, [0, 4], [2.5, 1.5], []])
def test_a_setting_that_is_no_shares_is_one_line(
    value: Any, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad input ends with 2 and says what `shares` takes."""
    run = write_run(tmp_path / "run.toml", shards, shares=value)
    assert main(["train", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "must be 'equal', 'measured' or a list of rows per data rank" in line


@pytest.mark.slow
def test_a_rank_of_half_speed_adds_what_it_can(shards: Path, tmp_path: Path) -> None:
    """Both together make 0.93 of what each makes alone, where equal shares make 0.7 at most."""
    told = {}
    for shares in ("equal", "measured"):
        found = trained(
            shards,
            tmp_path / shares,
            30,
            shares=shares,
            slow={"0": 0.04, "1": 0.08},
            batch_size=24,
            checkpoint_every=None,
        )
        told[shares] = sorted(found[0]["step seconds"][-12:])[6]
    alone = 1 / 0.04 + 1 / 0.08  # rows a second, but for the model's own time, which is little
    assert 24 / told["measured"] >= 0.93 * alone
    assert 24 / told["equal"] <= 0.7 * alone
