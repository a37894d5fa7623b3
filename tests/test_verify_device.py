"""The script for who has a device: its parts, what it compares, and all of it on the CPU."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import verify_device
from verify_device import Part, compare, left_out, main, parts_of, perform, run_parts
from verify_report import Outcome, Report, facts

pytest.importorskip("torch")


def write_losses(folder: Path, losses: list[float | None]) -> None:
    """A run's events, as trainers write them."""
    folder.mkdir()
    lines = [
        json.dumps({"kind": "step", "step": step, "loss": loss})
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "events.jsonl").write_text("\n".join(['{"kind": "begin"}', *lines]) + "\n")


def test_losses_are_held_against_the_cpus(tmp_path: Path) -> None:
    """Within the tolerance; another number, one further away, or one not finite does not hold."""
    write_losses(tmp_path / "cpu", [6.0, 5.0])
    write_losses(tmp_path / "near", [6.0, 5.0 * (1 + 0.9 * verify_device.TOLERANCE)])
    write_losses(tmp_path / "far", [6.0, 5.0 * (1 + 1.1 * verify_device.TOLERANCE)])
    write_losses(tmp_path / "short", [6.0])
    write_losses(tmp_path / "null", [6.0, None])
    names = ("near", "far", "short", "null")
    found = {name: compare(tmp_path, name)[0] for name in names}
    assert found == {"near": True, "far": False, "short": False, "null": False}


def test_a_part_that_fails_or_hangs_costs_itself(tmp_path: Path) -> None:
    """Its exit code and what it printed are kept, and the next one runs."""
    fails = perform(Part("fails", (sys.executable, "-c", "print('why'); exit(3)"), 60), tmp_path)
    assert (fails.held, fails.code, fails.output.strip()) == (False, 3, "why")
    hangs = perform(Part("hangs", (sys.executable, "-c", "input(); print()"), 60), tmp_path)
    assert not hangs.held
    late = perform(Part("late", (sys.executable, "-c", "while True: pass"), 0.5), tmp_path)
    assert (late.held, late.code) == (False, None)


def test_a_part_whose_time_is_up_may_end_its_own_processes(tmp_path: Path) -> None:
    """It is asked first, as torchrun needs it: killed, it would leave workers on the device."""
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('workers ended')))\n"
        "time.sleep(60)"
    )
    late = perform(Part("late", (sys.executable, "-c", code), 2), tmp_path)
    assert (late.held, late.code, late.output.strip()) == (False, None, "workers ended")


def test_every_axis_is_tried_on_several_devices_and_none_on_one() -> None:
    """As many processes as the axis takes; figures and tests only where they are asked for."""
    several = [part.name for part in parts_of("npu", 8, quick=True)]
    assert {f"npu, {axis}" for axis in ("data=8", "tensor=2", "pipeline=2", "context=2")} < {
        *several
    }
    assert {"npu, data=2, expert=2", "npu, data=2, pipeline=2, tensor=2"} < {*several}
    assert not any("=" in part.name for part in parts_of("npu", 1, quick=True))
    two = [part.name for part in parts_of("npu", 2, quick=True)]
    assert "npu, data=2, expert=2" in two
    assert "npu, data=2, tensor=2" not in two
    whole = [part.name for part in parts_of("npu", 1, quick=False)]
    assert {"tests of ms-kernels", "figures of ms-kernels", "figures of ms-profile"} < {*whole}


def test_what_no_device_has_run_is_tried_on_it() -> None:
    """The rows of README's table: half precision, kills, experts, tuning, PPO, QAT, recording."""
    names = {part.name for part in parts_of("npu", 1, quick=True)}
    assert {
        *("npu, bfloat16", "npu, ms-kernels", "npu, killed and gone on with", "npu, experts"),
        *("npu, tuning", "npu, PPO", "npu, rounded weights", "npu, recorded"),
    } <= names


def test_a_step_that_was_done_twice_counts_once(tmp_path: Path) -> None:
    """As after a kill: the later loss is that of the run that went on."""
    write_losses(tmp_path / "cpu", [6.0, 5.0])
    write_losses(tmp_path / "killed", [6.0, 9.0])
    with (tmp_path / "killed" / "events.jsonl").open("a") as events:
        events.write(json.dumps({"kind": "step", "step": 2, "loss": 5.0}) + "\n")
    assert compare(tmp_path, "killed")[0]


def test_a_device_that_is_not_there_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit code 2, and nothing is written."""
    monkeypatch.setattr(sys, "argv", ["v", "--out", str(tmp_path / "out"), "--device", "nowhere"])
    assert main() == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_page_tells_what_failed_what_did_not_run_and_what_to_send(tmp_path: Path) -> None:
    """To somebody who was not there: failures before all else, in words, with what they printed."""
    report = Report(
        tmp_path,
        facts("cpu", 2),
        planned=["one", "two", "three"],
        left_out=["figures: they need an accelerator"],
        command="python tools/verify_device.py --out report",
        began=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
    )
    report.add(Outcome("one", "a fact", True, 1.0, 0, "fine", "exact"))
    assert not report.holds()
    report.add(Outcome("two", "another fact", False, 2.0, 3, "why", "ended with code 3"))
    page = (tmp_path / "report.md").read_text()
    assert page.startswith("# 2 x CPU: 1 of 3 parts held; 1 not run\n")
    assert "Did not hold:\n\n- two: ended with code 3\n" in page
    assert "Not run:\n\n- three\n" in page
    assert "Left out:\n\n- figures: they need an accelerator\n" in page
    assert "begun 2026-01-02 03:04 UTC, 3 s of work" in page
    assert "| one | a fact | yes | 1 | exact |" in page
    assert page.index("## two, which did not hold") < page.index("## one")
    assert "report.json" in page.partition("## What to send")[2].partition("##")[0]
    record = json.loads((tmp_path / "report.json").read_text())
    assert record["facts"]["torch"]
    assert record["not_run"] == ["three"]
    assert [each["output"] for each in record["outcomes"]] == ["fine", "why"]


def test_every_part_says_what_it_shows_and_what_is_left_out_is_told() -> None:
    """The page is read by people who do not know the script."""
    for count in (1, 8):
        assert [part.name for part in parts_of("npu", count, quick=False) if not part.shows] == []
    told = list(left_out("npu", 1, quick=True))
    assert "every layout and the links: there is one device" in told
    assert "tests that need a device, and figures: --quick" in told


def test_a_budget_stops_what_is_slow_and_what_needs_it_and_nothing_else(tmp_path: Path) -> None:
    """Each part gets at most half of the time left; what was stopped counts as not run."""
    quick = (sys.executable, "-c", "print('done')")
    parts = [
        Part("slow", (sys.executable, "-c", "import time; time.sleep(3600)"), 3600),
        Part("needs it", quick, 60, needs=("slow",)),
        Part("quick", quick, 60),
    ]
    report = Report(
        tmp_path,
        facts("cpu", 1),
        planned=[part.name for part in parts],
        left_out=[],
        command="x",
        began=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
    )
    run_parts(parts, report, tmp_path, budget_s=20)
    record = json.loads((tmp_path / "report.json").read_text())
    assert [(each["name"], each["held"]) for each in record["outcomes"]] == [("quick", True)]
    assert record["not_run"] == ["slow", "needs it"]
    assert not report.holds()


def test_every_part_that_another_needs_comes_before_it() -> None:
    """So that a budget leaves out whole chains, never a part's ground."""
    for device, count in (("cpu", 2), ("cuda", 8)):
        seen: set[str] = set()
        for part in parts_of(device, count, quick=False):
            assert {*part.needs} <= seen, part.name
            seen.add(part.name)


@pytest.mark.slow
def test_all_of_it_holds_on_the_cpu(tmp_path: Path) -> None:
    """The quick form, two processes: every part holds, and the report says so."""
    script = str(Path(verify_device.__file__))
    out = tmp_path / "report"
    command = [sys.executable, script, "--out", str(out), "--device", "cpu", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((out / "report.json").read_text())
    assert all(part["held"] for part in record["outcomes"])
    assert record["not_run"] == []
    assert "processes: losses of six steps" in (out / "report.md").read_text()
