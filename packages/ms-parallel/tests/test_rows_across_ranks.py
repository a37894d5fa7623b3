"""Data ranks must read different rows, and the ranks within one the same; both are checked."""

from pathlib import Path
from typing import Any

import pytest
from processes import run_processes

from ms_data import build, train_tokenizer

RUNS = Path(__file__).parent / "row_runs.py"
REPEATED = "data ranks 0, 1 have the same rows"
DIFFERENT = "ranks 0 and 1 of data rank 0 have different rows"


@pytest.mark.parametrize("options", [{}, {"reproducible": True}])
def test_data_ranks_that_repeat_each_other_are_refused(options: dict[str, Any]) -> None:
    """In the first update, and in later ones if it lasts; on both ranks, before weights change."""
    steps = [[0, 0], [0, 1], *([n, n] for n in range(2, 10)), [10, 11], [12, 11]]
    for first, good, *repeated, after, last in run_processes(
        2, RUNS, "updates", layout="data=2", steps=steps, rows=4, **options
    ):
        assert REPEATED in first[0]
        assert "place=groups.place" in first[0]
        assert "\n" not in first[0]
        assert not first[1]
        assert good == ["", True]
        assert repeated[:7] == [["", True]] * 7
        assert REPEATED in repeated[7][0]
        assert not repeated[7][1]
        assert after == last == ["", True]


def test_some_data_ranks_that_repeat_each_other_are_named() -> None:
    """The last two of three data ranks read the same rows."""
    steps = [[0, 1, 1], [0, 1, 2]]
    for first, good in run_processes(3, RUNS, "updates", layout="data=3", steps=steps, rows=4):
        assert "data ranks 1, 2 have the same rows" in first[0]
        assert not first[1]
        assert good == ["", True]


def test_a_few_rows_may_repeat_by_chance() -> None:
    """Both ranks sometimes read the same two of five rows; training continues."""
    steps = [[0, 0], [0, 1], [2, 2], [3, 3], [3, 4], [1, 1]]
    for results in run_processes(2, RUNS, "updates", layout="data=2", steps=steps, rows=2):
        assert results == [["", True]] * 6


def test_a_single_row_per_rank_may_repeat() -> None:
    """A small dataset may have the same row for each rank: it trains, with one warning."""
    steps = [[0, 0], [0, 1], [2, 2], [3, 3]]
    for results in run_processes(2, RUNS, "updates", layout="data=2", steps=steps, rows=1):
        assert results == [["", True]] * 4


def test_copies_of_one_row_may_repeat() -> None:
    """A small dataset may fill the first batches of all ranks with one row; it trains."""
    steps = [[0, 0], [0, 1], [2, 2]]
    for results in run_processes(
        2, RUNS, "updates", layout="data=2", steps=steps, rows=1, copies=3
    ):
        assert results == [["", True]] * 3


def test_rows_without_targets_may_repeat() -> None:
    """Padding on one data rank or on both trains nothing twice."""
    assert run_processes(2, RUNS, "refusals_of_padding", layout="data=2") == [["", ""], ["", ""]]


def test_a_stream_without_a_place_is_refused(tmp_path: Path) -> None:
    """Both ranks would read the same rows; with the place of their data rank they train."""
    text = tmp_path / "text.jsonl"
    words = ["to", "be", "or", "not", "that", "is", "the", "question", "whether", "it", "nobler"]
    lines = [" ".join(words[(i * j + j) % 11] for j in range(9)) for i in range(200)]
    text.write_text("".join(f'{{"text": "{line} {i}"}}\n' for i, line in enumerate(lines)))
    train_tokenizer(text, vocab_size=300, out=tmp_path / "tokenizer.json")
    build(text, tokenizer=tmp_path / "tokenizer.json", out=tmp_path / "shards")
    for without, placed in run_processes(2, RUNS, "streams", folder=str(tmp_path / "shards")):
        assert REPEATED in without
        assert placed == ""


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("pipeline=2", {}),
        ("tensor=2", {}),
        ("context=2", {}),
        ("pipeline=2", {"reproducible": True}),
    ],
)
def test_ranks_of_a_data_rank_must_have_the_same_rows(layout: str, options: dict[str, Any]) -> None:
    """Updates, evaluations and prompts are refused on both ranks; the engine works afterwards."""
    for result in run_processes(2, RUNS, "within", layout=layout, **options):
        for call in ("first", "later", "evaluate", "generate"):
            assert DIFFERENT in result[call], call
            assert "\n" not in result[call]
        assert result["same"] == ""
        assert result["unchanged"]
        assert result["after"] == ["", "", ""]


def test_swapped_rows_of_two_data_ranks_do_not_cancel() -> None:
    """The second pipeline rank of each data rank has the rows of the other data rank."""
    steps = [[0, 1, 0, 1], [2, 3, 3, 2]]
    layout = "data=2,pipeline=2"
    for good, swapped in run_processes(4, RUNS, "updates", layout=layout, steps=steps, rows=2):
        assert good == ["", True]
        assert "of data rank 0 have different rows" in swapped[0]
        assert not swapped[1]


@pytest.mark.parametrize("options", [{}, {"reproducible": True}])
def test_the_check_adds_no_collective_to_a_step(options: dict[str, Any]) -> None:
    """One gather in the first update; afterwards the counts, the gradients and the totals."""
    for first, *rest in run_processes(2, RUNS, "messages", layout="pipeline=2", **options):
        assert first.get("all_gather") == 1
        assert rest[0] == rest[1]
        assert "all_gather" not in rest[0]
        assert rest[0]["all_reduce"] == 1
    settings = {"sharding": "replicate", **options}
    for first, *rest in run_processes(2, RUNS, "messages", layout="data=2", **settings):
        assert rest[0] == rest[1]
        assert first == {**rest[0], "all_gather": rest[0]["all_gather"] + 1}
        if not options:
            assert rest[0] == {"all_gather": 1, "all_reduce": 2}
