"""The runtime runs any table and holds no more activations than it needs."""

from pathlib import Path

import pytest
from processes import run_processes

from ms_parallel.schedules import GENERATORS

PIPELINES = Path(__file__).parent / "pipelines.py"
# As in test_layouts.
TOLERANCE = 1e-5


def row(*parts: str) -> str:
    """A line of a table from words such as 0F (all four microbatches) or 0F1 (one)."""
    cells = []
    for part in parts:
        cells += [part] if part[-1].isdigit() else [f"{part}{index}" for index in range(4)]
    return ",".join(cells)


V_SHAPE = "\n".join(
    [
        row("0F", "3F0", "3B0", "3F1", "3B1", "3F2", "3B2", "3F3", "3B3", "0B"),
        row("1F", "2F", "2B", "1B"),
    ]
)
INTERLEAVED = "\n".join([row("0F", "2F", "2B", "0B"), row("1F", "3F", "3B", "1B")])


def test_several_stages_per_rank_equal_one_process() -> None:
    """A V, whose tied ends are on one rank, and two interleaved stages per rank, from CSV."""
    (single,) = run_processes(1, PIPELINES, "tables", texts=[""], steps=6)
    for results in run_processes(2, PIPELINES, "tables", texts=[V_SHAPE, INTERLEAVED], steps=6):
        for result in results:
            for curve, expected in zip(result["curve"], single[0]["curve"], strict=True):
                assert curve == pytest.approx(expected, rel=TOLERANCE)
            assert result["greedy"] == single[0]["greedy"]
            assert result["sampled"] == single[0]["sampled"]


def test_every_schedule_handles_an_uneven_last_microbatch() -> None:
    """Curves, token losses, logits and generated tokens equal one process's."""
    ((single,),) = run_processes(1, PIPELINES, "train_schedules", schedules=["single"], steps=2)
    names = list(GENERATORS)
    for results in run_processes(2, PIPELINES, "train_schedules", schedules=names, steps=2):
        for name, result in zip(names, results, strict=True):
            for curve, expected in zip(result["curve"], single["curve"], strict=True):
                assert curve == pytest.approx(expected, rel=TOLERANCE), name
            assert result["losses"] == [pytest.approx(row, rel=1e-4) for row in single["losses"]], (
                name
            )
            assert result["from logits"] == pytest.approx(single["from logits"], rel=1e-4), name
            assert result["greedy"] == single["greedy"], name
            assert result["sampled"] == single["sampled"], name


def test_one_f_one_b_frees_activations_that_gpipe_holds() -> None:
    """The first of two stages holds 2 of 8 microbatches with 1F1B, and all 8 with GPipe."""
    first, last = run_processes(2, PIPELINES, "max_live_microbatches", schedule="1f1b")
    assert (first, last) == (2, 1)
    assert run_processes(2, PIPELINES, "max_live_microbatches", schedule="gpipe") == [8, 8]


@pytest.mark.parametrize(
    "layout", ["data=3", pytest.param("tensor=4", marks=pytest.mark.slow), "pipeline=4"]
)
def test_other_numbers_of_ranks_equal_one_process(layout: str) -> None:
    """Three ranks shard unevenly, and four stages include inner ones."""
    (expected,) = run_processes(1, PIPELINES, "losses", layout="data=1", steps=4)
    count = int(layout.partition("=")[2])
    for losses in run_processes(count, PIPELINES, "losses", layout=layout, steps=4):
        assert losses == pytest.approx(expected, rel=TOLERANCE)
