"""The driver of `examples/road`: finished steps are skipped, interrupted ones continue.

The steps here are small scripts; `nox -s road` runs the real ones.
"""

import json
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "road"))
import page
import road
import tasks

ROAD = Path(road.__file__).parent

COUNT = """
import pathlib, sys, time
folder = pathlib.Path("numbers")
folder.mkdir(exist_ok=True)
open("starts", "a").write("x")
for number in range(5):
    if not (folder / str(number)).exists():
        time.sleep(float(sys.argv[1]))
        (folder / str(number)).write_text(str(number))
        open("written", "a").write(str(number))
"""
RUN = """
import sys
from pathlib import Path
sys.path.insert(0, {road!r})
import road
command = "{script} 0.4"
step = road.Step(name="count", purpose="", commands=(command,), outputs=("numbers",), seconds=2)
road.steps = lambda: [step]
sys.exit(road.main(["--folder", "road"]))
"""


@pytest.fixture
def count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the steps by a single step that writes five files and can resume."""
    script = tmp_path / "count.py"
    script.write_text(COUNT)
    step = road.Step(
        name="count",
        purpose="count to five",
        commands=(f"{script} 0",),
        outputs=("numbers",),
        seconds=1,
    )
    monkeypatch.setattr(road, "steps", lambda: [step])
    return script


def run(tmp_path: Path, *arguments: str) -> int:
    """Run the driver in a folder of the test."""
    return road.main(["--folder", str(tmp_path / "road"), *arguments])


def test_a_finished_step_is_skipped(tmp_path: Path, count: Path) -> None:
    """The second run starts no process."""
    assert run(tmp_path) == 0
    assert run(tmp_path) == 0
    assert (tmp_path / "road" / "starts").read_text() == "x"


def test_a_step_whose_output_was_deleted_runs_again(tmp_path: Path, count: Path) -> None:
    """A marker without its output does not count."""
    assert run(tmp_path) == 0
    for path in (tmp_path / "road" / "numbers").iterdir():
        path.unlink()
    (tmp_path / "road" / "numbers").rmdir()
    assert run(tmp_path) == 0
    assert (tmp_path / "road" / "written").read_text() == "0123401234"


def test_from_deletes_the_outputs_and_repeats_the_step(tmp_path: Path, count: Path) -> None:
    """Old files do not survive."""
    assert run(tmp_path) == 0
    (tmp_path / "road" / "numbers" / "old").touch()
    assert run(tmp_path, "--from", "count") == 0
    assert not (tmp_path / "road" / "numbers" / "old").exists()
    assert (tmp_path / "road" / "written").read_text() == "0123401234"


def test_a_failed_step_gives_its_exit_code_and_can_be_fixed(
    tmp_path: Path, count: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the fix the same command continues."""
    count.write_text("import sys; sys.exit(3)")
    assert run(tmp_path) == 3
    assert "count failed" in capsys.readouterr().err
    count.write_text(COUNT)
    assert run(tmp_path) == 0


def test_an_unknown_step_is_refused_with_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and exit code 2."""
    assert run(tmp_path, "--from", "pretain") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no step 'pretain'; the steps are clean, dedup" in line


def test_after_kill_9_the_same_command_continues(tmp_path: Path) -> None:
    """No file is written twice, although the killed driver's child was still running."""
    (tmp_path / "count.py").write_text(COUNT)
    code = RUN.format(road=str(ROAD), script=tmp_path / "count.py")
    command = [sys.executable, "-c", code]
    driver = subprocess.Popen(command, cwd=tmp_path)
    written = tmp_path / "road" / "written"
    deadline = time.monotonic() + 60
    while not (written.exists() and len(written.read_text()) >= 2):
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
    assert sorted(written.read_text()) == list("01234")
    assert (tmp_path / "road" / "starts").read_text() == "xx"


def test_the_list_shows_every_command_without_running_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run files that it names exist."""
    assert run(tmp_path, "--list") == 0
    output = capsys.readouterr().out
    assert "ms_align ppo" in output
    files = {word for word in output.split() if word.endswith((".toml", ".jinja", ".py"))}
    assert len(files) > 10
    assert all(Path(file).is_file() for file in files)
    assert not (tmp_path / "road").exists()


def test_pretraining_uses_the_planned_layout() -> None:
    """The run file leaves the layout to the planner, and the page reports its choice."""
    assert tomllib.loads((ROAD / "pretrain.toml").read_text())["layout"] == "auto"
    plan = {"kind": "plan", "layout": "data=2", "predicted_step_s": 0.25}
    steps = [{"kind": "step", "time_s": time_s} for time_s in (0.0, 0.5, 1.0)]
    sentence = page.planned_layout([plan, *steps])
    assert "the layout data=2" in sentence
    assert "predicted 0.25 s per step; the median step took 0.50 s" in sentence


def test_held_out_questions_are_not_in_the_training_data(tmp_path: Path) -> None:
    """Neither sums nor docstrings."""
    docstrings = tmp_path / "docstrings"
    docstrings.mkdir()
    rows = [tasks.chat(f"Write the docstring of {n}.", f"says {n}") for n in range(700)]
    for name in ("describe", "implement"):
        tasks.write_rows(docstrings / f"{name}.jsonl", rows)
    counts = tasks.write_tasks(docstrings, tmp_path / "tasks")
    assert counts["add"] + counts["held_out"] == 8100

    def questions(*names: str) -> set[str]:
        prompts = set()
        for name in names:
            for line in (tmp_path / "tasks" / f"{name}.jsonl").read_text().splitlines():
                row = json.loads(line)
                prompt = row.get("messages") or row["prompt"]
                prompts.add(prompt if isinstance(prompt, str) else prompt[0]["content"])
        return prompts

    training = questions("add", "describe", "implement", "pairs", "prompts", "mixed")
    assert len(training) > 6000
    assert not training & questions("held_out", "held_out_few", "held_out_chats")
    assert tasks.spaced(131) == "1 3 1"


def write_records(folder: Path) -> None:
    """Write the smallest records that the page reads."""
    events = {
        "pretrain": [
            {"kind": "plan", "layout": "data=2", "predicted_step_s": 0.5},
            {"kind": "step", "step": 1, "loss": 8.0, "time_s": 10.0},
            {"kind": "step", "step": 2, "loss": 7.0, "time_s": 10.75},
            {"kind": "evaluate", "step": 2, "held_out_loss": 7.5},
        ],
        "sft": [{"kind": "tasks", "step": 1, "loss.add": 2.0, "probability.add": 0.5}],
        "reward": [{"kind": "evaluate", "step": 1, "held_out_accuracy": 0.75}],
        "ppo": [
            {"kind": "evaluate", "step": 0, "right": 0.25},
            {"kind": "rollout", "rollout": 1, "reward": 0.5, "reward.right": 0.4, "kl": 0.1},
            {"kind": "evaluate", "step": 4, "right": 0.5},
        ],
    }
    for name, rows in events.items():
        (folder / name).mkdir(parents=True)
        tasks.write_rows(folder / name / "events.jsonl", rows)
    model = {
        "model": "tuned",
        "runtime": "transformers",
        "folder": "sft/model",
        "correct": 3,
        "asked": 4,
        "sums": ["2 1"],
        "docstrings": ["<b>Return.</b>"],
    }
    answers = {
        "questions": ["What is 1 0 + 1 1?"],
        "expected": ["2 1"],
        "functions": ["def f(x): return x < 2"],
        "docstrings": ["Return whether <x> is below 2."],
        "models": [model],
    }
    (folder / "answers.json").write_text(json.dumps(answers))
    (folder / "done").mkdir()
    (folder / "done" / "ppo.json").write_text(json.dumps({"wall_s": 90.0, "cpu_s": 88.0}))


def test_the_page_shows_the_records_and_loads_nothing(tmp_path: Path) -> None:
    """Curves of each training, escaped texts, no address that a browser would fetch."""
    write_records(tmp_path)
    text = page.render(tmp_path)
    assert text.count("<svg") == 6
    assert "75.0%" in text
    assert "25.0 to 50.0%" in text
    assert "predicted 0.50 s per step; the median step took 0.75 s" in text
    assert "1.5 min" in text
    assert "&lt;b&gt;Return.&lt;/b&gt;" in text
    assert "<b>Return" not in text
    assert "<script" not in text
    assert 'src="' not in text
    assert 'href="http' not in text


def test_the_page_of_an_unfinished_road_says_so(tmp_path: Path) -> None:
    """Missing records give empty plots, not an error."""
    assert page.render(tmp_path).count("nothing was recorded") == 6
