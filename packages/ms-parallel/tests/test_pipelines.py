"""The runtime performs any table of forwards and backwards, and holds no more than it says."""

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


def test_several_stages_a_rank_train_and_answer_as_one_process() -> None:
    """A V, whose tied ends meet on one rank, and two stages a rank in turn; read from CSV."""
    (one,) = run_processes(1, PIPELINES, "tables", texts=[""], steps=6)
    for of_rank in run_processes(2, PIPELINES, "tables", texts=[V_SHAPE, INTERLEAVED], steps=6):
        for found in of_rank:
            for curve, expected in zip(found["curve"], one[0]["curve"], strict=True):
                assert curve == pytest.approx(expected, rel=TOLERANCE)
            assert found["greedy"] == one[0]["greedy"]
            assert found["sampled"] == one[0]["sampled"]


def test_every_schedule_trains_answers_and_generates_with_an_uneven_last_microbatch() -> None:
    """Curves, losses of each token, logits and generated tokens are one process's."""
    ((one,),) = run_processes(1, PIPELINES, "under", schedules=["alone"], steps=2)
    names = list(GENERATORS)
    for of_rank in run_processes(2, PIPELINES, "under", schedules=names, steps=2):
        for name, found in zip(names, of_rank, strict=True):
            for curve, expected in zip(found["curve"], one["curve"], strict=True):
                assert curve == pytest.approx(expected, rel=TOLERANCE), name
            assert found["losses"] == [pytest.approx(row, rel=1e-4) for row in one["losses"]], name
            assert found["from logits"] == pytest.approx(one["from logits"], rel=1e-4), name
            assert found["greedy"] == one["greedy"], name
            assert found["sampled"] == one["sampled"], name


def test_one_f_one_b_frees_activations_that_gpipe_holds() -> None:
    """The first of two stages holds 2 of 8 microbatches under 1F1B, and all 8 under GPipe."""
    first, last = run_processes(2, PIPELINES, "most_held", schedule="1f1b")
    assert (first, last) == (2, 1)
    assert run_processes(2, PIPELINES, "most_held", schedule="gpipe") == [8, 8]


@pytest.mark.parametrize("layout", ["data=3", "tensor=4", "pipeline=4"])
def test_other_numbers_of_ranks_equal_one_process(layout: str) -> None:
    """Three ranks shard unevenly; four stages have inner ones."""
    (one,) = run_processes(1, PIPELINES, "losses", layout="data=1", steps=4)
    count = int(layout.partition("=")[2])
    for losses in run_processes(count, PIPELINES, "losses", layout=layout, steps=4):
        assert losses == pytest.approx(one, rel=TOLERANCE)
