"""`ms-parallel schedule`: timeline, facts and files; bad input gives one line and exit code 2."""

import json
from pathlib import Path

import pytest

from ms_parallel.cli import main
from ms_parallel.schedules import Schedule, one_f_one_b


def test_the_timeline_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Bubble, memory per rank and the critical path; the bubble follows the closed formula."""
    assert main(["schedule", "1f1b", "--stages", "4", "--microbatches", "8"]) == 0
    output = capsys.readouterr().out
    assert "1F1B, 4 ranks, 4 stages, 8 microbatches: makespan 33, bubble 27.27%" in output
    assert output.count("peak") == 4
    assert "critical path: rank 0: 0F0" in output


def test_facts_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Costs per stage count: the slow last stage determines the makespan."""
    arguments = ["schedule", "zb1p", "--stages", "2", "--microbatches", "4", "--json"]
    assert main([*arguments, "--costs", "forward=1:2,latency=1/2"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["placement"] == [0, 1]
    assert facts["makespan"] >= 4 * (2 + 1 + 1) + 1.5
    assert facts["critical_path"][0] == "0:0F0"
    assert main([*arguments[:-1], "--costs", "forward=1:2:3"]) == 2


def test_overlapped_pairs_are_reported_as_sequential(capsys: pytest.CaptureFixture[str]) -> None:
    """DualPipeV's overlap brings no gain here; the command counts pairs and says how they run."""
    sizes = ["--stages", "2", "--microbatches", "4"]
    assert main(["schedule", "dualpipe-v", *sizes]) == 0
    output = capsys.readouterr().out
    assert main(["schedule", "dualpipe-v", *sizes, "--json"]) == 0
    pairs = json.loads(capsys.readouterr().out)["overlapped_pairs"]
    assert pairs > 0
    assert f"{pairs} overlapped pairs are timed and run one after the other" in output
    assert main(["schedule", "zb-v", *sizes]) == 0
    assert "overlapped" not in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["svg", "html", "csv"])
def test_files_contain_the_drawing_or_the_table(suffix: str, tmp_path: Path) -> None:
    """A CSV file gives the same schedule when read again."""
    out = tmp_path / f"one.{suffix}"
    assert (
        main(["schedule", "1f1b", "--stages", "2", "--microbatches", "3", "--out", str(out)]) == 0
    )
    text = out.read_text()
    if suffix == "csv":
        assert Schedule.from_csv(text, name="1F1B") == one_f_one_b(2, 3)
        assert main(["schedule", str(out)]) == 0
    else:
        assert "<svg" in text
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_a_search_prints_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    """With four costs there are two stages per rank."""
    sizes = ["--stages", "2", "--microbatches", "2", "--costs", "forward=1:1:1:1.4"]
    assert main(["schedule", "search", *sizes, "--memory-cap", "4"]) == 0
    output = capsys.readouterr().out
    assert "2 ranks, 4 stages" in output
    assert "no schedule is shorter than" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zb-w", "--stages", "2", "--microbatches", "2"], "unknown schedule 'zb-w'; did you"),
        (["1f1b", "--microbatches", "2"], "1f1b needs sizes; add --stages"),
        (["1f1b", "--stages", "2", "--microbatches", "0"], "got 2 stages and 0 microbatches"),
        (
            ["1f1b", "--stages", "0", "--microbatches", "2"],
            "ranks must be an integer of at least 1, got 0",
        ),
        (["none.csv"], "schedule none.csv: cannot be read: No such file"),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--costs", "forwrd=1"], "'forward'"),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--costs", "forward=x"], "not a number"),
        (
            ["1f1b", "--stages", "2", "--microbatches", "2", "--out", "a.png"],
            "unsupported suffix '.png'",
        ),
        (
            ["1f1b", "--stages", "2", "--microbatches", "2", "--out", "no/a.svg"],
            "cannot write no/a.svg: No such file",
        ),
        (
            ["1f1b", "--stages", "2", "--microbatches", "2", "--memory-cap", "1"],
            "memory_cap needs schedule 'search', got 1f1b",
        ),
        (
            ["search", "--stages", "2", "--microbatches", "2", "--memory-cap", "0.5"],
            "needs at least 1 of activation memory",
        ),
    ],
)
def test_bad_input_gives_a_one_line_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The problem and the remedy, with exit code 2."""
    assert main(["schedule", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("ms-parallel: ")
    assert message in lines[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0junk,0B0\n", "line 1, cell 1: '0F0junk' is not an action"),
        ("0F0,0UNSHARD1,0B0\n", "UNSHARD takes no microbatch"),
        ("0UNSHARD,0F0,0RESHARD,0B0\n", "0B0 (rank 0, action 3) uses weights that are not"),
        ("(0F0;0B0)OVERLAP\n", "line 1, cell 1"),
        ("(0F1;0W0)OVERLAP_F_B,0F0\n", "does not pair a forward with a backward"),
        ("(0F0;0B0)OVERLAP_F_B\n", "comes before 0F0"),
        ("0F0,0F1,0B0\n", "0B1 is missing on rank 0"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0\n", "1SEND_B0 is missing on rank 1"),
        ("", "has no actions"),
    ],
)
def test_an_invalid_table_is_refused_with_the_location(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Junk, misplaced shards and overlaps, missing backward passes: one line each."""
    table = tmp_path / "elsewhere.csv"
    table.write_text(text)
    assert main(["schedule", str(table)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "elsewhere.csv" in line
    assert message in line


def test_a_table_that_deadlocks_is_refused_with_the_location(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both ranks would wait in a receive forever."""
    table = tmp_path / "circle.csv"
    table.write_text(
        "0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
    )
    assert main(["schedule", str(table)]) == 2
    assert "circle.csv: deadlock: rank 0 is at 0RECV_B0" in capsys.readouterr().err
