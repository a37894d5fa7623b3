"""The road's driver: what is done is skipped, what was cut short goes on, what changed is redone.

The stages here are small scripts; `nox -s road` walks the real ones.
"""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROAD = Path(__file__).parents[1] / "examples" / "road"
sys.path.insert(0, str(ROAD))

pytest.importorskip("msgspec")
import chart  # noqa: E402
import page  # noqa: E402
import road  # noqa: E402
import stages  # noqa: E402
import stamps  # noqa: E402
import tasks  # noqa: E402

COUNT = """
import os, pathlib, sys, time
place = pathlib.Path("made")
place.mkdir(exist_ok=True)
with open("tries", "a") as tries:
    tries.write("x")
for number in range(5):
    if not (place / str(number)).exists():
        time.sleep(float(sys.argv[1]))
        (place / str(number)).write_text(str(number))
        open("written", "a").write(str(number))
(place / "whole").write_text("all")
"""


def script(folder: Path, text: str = COUNT) -> Path:
    """A script that makes five files, and goes on where it stopped."""
    path = folder / "count.py"
    path.write_text(text)
    return path


def stage_of(path: Path, *words: str, **more: object) -> stages.Stage:
    """A stage that runs a script."""
    given = {
        "name": "count",
        "what": "count",
        "commands": (stages.Command(words=(str(path), *words)),),
        "settings": (path,),
        "makes": ("made",),
        "typical_s": 1.0,
    }
    return stages.Stage(**(given | more))  # type: ignore[arg-type]


def walk(folder: Path, *chosen: stages.Stage) -> int:
    """Walk some stages in a folder."""
    folder.mkdir(exist_ok=True)
    with road.held(folder) as lock:
        return road.walk(chosen, folder, lock)


def tries(folder: Path) -> int:
    """How often the script was started."""
    return len((folder / "tries").read_text())


def test_the_pre_training_is_laid_out_by_the_planner() -> None:
    """Its run file leaves the layout to the plan, and the page says what was chosen."""
    assert tomllib.loads((ROAD / "pretrain.toml").read_text())["layout"] == "auto"
    told = {"kind": "plan", "layout": "data=2", "predicted_step_s": 0.25}
    steps = [{"kind": "step", "time_s": at} for at in (0.0, 0.5, 1.0)]
    said = page.planned([told, *steps])
    assert "data=2" in said
    assert "predicted 0.25 s an update, and the median took 0.50 s" in said


def test_a_stage_that_is_done_is_skipped(tmp_path: Path) -> None:
    """The same walk again starts nothing."""
    stage = stage_of(script(tmp_path), "0")
    assert walk(tmp_path / "road", stage) == 0
    assert walk(tmp_path / "road", stage) == 0
    assert tries(tmp_path / "road") == 1
    assert stamps.state(stage, tmp_path / "road") == "done"


@pytest.mark.parametrize("change", ["script", "command", "input"])
def test_a_stage_is_done_anew_where_what_it_is_made_from_changed(
    tmp_path: Path, change: str
) -> None:
    """By content: a touched file changes nothing, another byte does; old outputs are removed."""
    folder = tmp_path / "road"
    folder.mkdir()
    (folder / "read").write_text("first")
    path = script(tmp_path)
    stage = stage_of(path, "0", reads=("read",))
    assert walk(folder, stage) == 0
    (folder / "made" / "old").write_text("of the first walk")
    os.utime(path)
    if change == "script":
        script(tmp_path, COUNT + "\n# more\n")
    if change == "command":
        stage = stage_of(path, "0.0", reads=("read",))
    if change == "input":
        (folder / "read").write_text("second")
    assert stamps.state(stage, folder) == "changed"
    assert walk(folder, stage) == 0
    assert not (folder / "made" / "old").exists()
    assert (folder / "written").read_text() == "0123401234"


def test_an_output_that_was_damaged_is_made_again(tmp_path: Path) -> None:
    """What a stage made is held by its content too."""
    folder, stage = tmp_path / "road", stage_of(script(tmp_path), "0")
    assert walk(folder, stage) == 0
    (folder / "made" / "whole").write_text("less")
    assert stamps.state(stage, folder) == "begun"
    assert walk(folder, stage) == 0
    assert (folder / "made" / "whole").read_text() == "all"


DRIVER = """
import sys
sys.path[:0] = [{road!r}, {tests!r}]
from pathlib import Path
import test_road
sys.exit(test_road.walk(Path("road"), test_road.stage_of(Path("count.py").resolve(), "0.4")))
"""


def test_after_kill_9_the_same_command_goes_on(tmp_path: Path) -> None:
    """Nothing that was made is made twice, and no process of the killed walk works on."""
    script(tmp_path)
    code = DRIVER.format(road=str(ROAD), tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", code]
    driver = subprocess.Popen(command, cwd=tmp_path)
    written = tmp_path / "road" / "written"
    until = time.monotonic() + 60
    while not (written.exists() and len(written.read_text()) >= 2):
        assert driver.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
    assert sorted(written.read_text()) == list("01234")
    assert tries(tmp_path / "road") == 2


def test_a_stage_that_fails_ends_the_walk_and_can_be_mended(tmp_path: Path) -> None:
    """Exit code 1, and the same command resumes once the script is mended."""
    folder = tmp_path / "road"
    path = script(tmp_path, "import sys; sys.exit(3)")
    assert walk(folder, stage_of(path, "0")) == 1
    script(tmp_path)
    assert walk(folder, stage_of(path, "0")) == 0


def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stage that nobody knows, and one whose inputs nobody made, are named with the remedy."""
    assert road.main(["--folder", str(tmp_path / "road"), "--only", "pretain"]) == 2
    assert "there is no stage 'pretain'; there are clean, dedup" in capsys.readouterr().err
    assert road.main(["--folder", str(tmp_path / "road"), "--only", "pretrain"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("which is not there; run shards")


def test_what_a_stage_reads_was_made_before_it() -> None:
    """The list is in order, settings are there, and no name stands twice."""
    made: set[str] = set()
    for stage in stages.all_stages():
        tops = {name.split("/")[0] for name in made}
        for name in stage.reads:
            assert name in made or (name in tops), f"{stage.name} reads {name}"
        assert all(path.is_file() for path in stage.settings), stage.name
        made |= {*stage.makes}
    names = [stage.name for stage in stages.all_stages()]
    assert len(set(names)) == len(names)


def test_tasks_hold_out_what_they_ask_later(tmp_path: Path) -> None:
    """No held-out sum and no held-out docstring is in what is learned from."""
    docstrings = tmp_path / "docstrings"
    docstrings.mkdir()
    rows = [tasks.chat(f"Write the docstring of {n}.", f"says {n}") for n in range(700)]
    for name in ("describe", "implement"):
        tasks.write_lines(docstrings / f"{name}.jsonl", rows)
    counts = tasks.write_tasks(docstrings, tmp_path / "tasks")
    assert counts["add"] + counts["held_out"] == 8100

    def questions(*names: str) -> set[str]:
        found = set()
        for name in names:
            for line in (tmp_path / "tasks" / f"{name}.jsonl").read_text().splitlines():
                row = json.loads(line)
                chat = row.get("messages") or row["prompt"]
                found.add(chat if isinstance(chat, str) else chat[0]["content"])
        return found

    learned = questions("add", "describe", "implement", "pairs", "prompts", "mixed")
    assert not learned & questions("held_out", "held_out_few", "held_out_chats")
    assert tasks.apart(131) == "1 3 1"


def recorded(folder: Path) -> None:
    """What stages leave behind, as small as it comes."""
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
        tasks.write_lines(folder / name / "events.jsonl", rows)
    told = {"model": "tuned", "runtime": "transformers", "right": 3, "asked": 4}
    answers = {
        "questions": ["What is 1 0 + 1 1?"],
        "known": ["2 1"],
        "functions": ["def f(x): return x < 2"],
        "docstrings": ["Return whether <x> is below 2."],
        "told": [told | {"sums": ["2 1"], "docstrings": ["<b>Return.</b>"]}],
    }
    (folder / "facts").mkdir()
    (folder / "facts" / "answers.json").write_text(json.dumps(answers))


def test_the_page_shows_what_was_recorded_and_loads_nothing(tmp_path: Path) -> None:
    """Curves of each training, texts without their markup, and no address."""
    recorded(tmp_path)
    text = page.render(tmp_path)
    assert text.count("<svg") == 6
    assert "75.0 %" in text
    assert "25.0 to 50.0 %" in text
    assert "the layout data=2" in text
    assert "predicted 0.50 s an update, and the median took 0.75 s" in text
    assert "&lt;b&gt;Return.&lt;/b&gt;" in text
    assert "<b>Return" not in text
    assert "http" not in text
    assert "<script" not in text


def test_the_page_of_a_road_that_was_hardly_begun_says_so(tmp_path: Path) -> None:
    """What was not recorded is a note, not an error."""
    assert page.render(tmp_path).count("nothing was recorded") == 6


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (3.0, 3.0), (-2.0, 11.3), (1e-9, 2e-9)])
def test_ticks_are_round_and_enclose_what_is_drawn(low: float, high: float) -> None:
    """From three to seven numbers, evenly apart."""
    found = chart.ticks(low, high)
    assert 2 <= len(found) <= 7
    assert found[0] <= low + 1e-12
    assert found[-1] >= high - 1e-12
