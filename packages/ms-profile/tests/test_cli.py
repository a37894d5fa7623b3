"""The command line: output and exit codes."""

import json
from pathlib import Path

import pytest

from ms_profile.cli import main
from ms_profile.log.event_log import EventLog


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log of two ranks with three steps each."""
    logs = [EventLog(tmp_path / "events", rank=rank) for rank in range(2)]
    for step in range(3):
        for log in logs:
            log("step", {"step": step, "loss": 1 / (step + 1)})
    for log in logs:
        log("end", {"why": "done"})
        log.close()
    return tmp_path


def test_logs_are_printed_in_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line per event, times in UTC, ranks merged; accepts a run folder or its log folder."""
    assert main(["logs", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert lines == sorted(lines, key=lambda line: line[:27])
    assert lines[0].endswith("step=0 loss=1")
    assert main(["logs", str(folder / "events"), "--kind", "end", "--rank", "1"]) == 0
    assert capsys.readouterr().out.split()[1:3] == ["1", "end"]


def test_logs_are_printed_as_json_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line is an object that contains the event's fields."""
    assert main(["logs", str(folder), "--json", "--first-step", "2", "--last-step", "2"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(record["rank"], record["fields"]["step"]) for record in records] == [(0, 2), (1, 2)]


def test_damage_is_reported_and_gives_exit_code_1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Readable events are printed."""
    path = folder / "events/rank-00001.000000.events"
    path.write_bytes(path.read_bytes()[:-3])
    assert main(["logs", str(folder)]) == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 4
    assert "ends inside a block" in captured.err


def test_logs_are_exported_to_tensorboard(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The number of scalars is printed, and no partial files remain."""
    assert main(["logs", str(folder), "--tensorboard", str(folder / "tb")]) == 0
    assert capsys.readouterr().out.startswith("6 scalars")
    assert [path.suffix for path in (folder / "tb").rglob("*") if path.is_file()] == [
        ".ms-profile",
        ".ms-profile",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["logs", "nowhere"], "nowhere has no event files"),
        (["logs", ".", "--rank", "one"], "--rank"),
        (["link"], "--nproc-per-node"),
        (["link", "--nproc-per-node", "1"], "must be at least 2"),
        (
            ["link", "--nproc-per-node", "2", "--repeats", "0"],
            "--repeats must be at least 1, got 0",
        ),
        (
            ["compare", "a", "b", "--min-change", "-1"],
            "--min-change must be at least 0 and below 1, got -1",
        ),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The problem, its place and the fix, without a traceback."""
    monkeypatch.delenv("RANK", raising=False)
    assert main(arguments) == 2
    captured = capsys.readouterr().err
    assert captured.startswith("ms-profile: ")
    assert message in captured
    assert len(captured.splitlines()) == 1


def test_every_command_has_an_example_in_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    """As a line that can be copied to a shell."""
    from ms_profile.cli import COMMANDS

    for name in COMMANDS:
        with pytest.raises(SystemExit) as ending:
            main([name, "--help"])
        assert ending.value.code == 0
        assert f"example: ms-profile {name}" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["", "one", "-1", "9" * 5000])
def test_a_rank_that_is_not_a_number_gives_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    value: str,
) -> None:
    """An invalid environment variable is named, and nothing is written."""
    monkeypatch.setenv("RANK", value)
    monkeypatch.setenv("WORLD_SIZE", "1")
    script = tmp_path / "script.py"
    script.write_text("")
    out = tmp_path / "out"
    assert main(["run", "--train-script", str(script), "--output-dir", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the environment variable RANK must be a number" in line
    assert not out.exists()
