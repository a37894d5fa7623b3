"""`tools/verify_device.py`: its parts, its comparisons, and a full run on the CPU."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import verify_device
from verify_device import Part, compare, excluded_parts, main, parts_of, perform, run_parts
from verify_report import Outcome, Report, facts

pytest.importorskip("torch")


def write_losses(folder: Path, losses: list[float | None]) -> None:
    """Write a run's event log in the format of the trainers."""
    folder.mkdir()
    lines = [
        json.dumps({"kind": "step", "step": step, "loss": loss})
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "events.jsonl").write_text("\n".join(['{"kind": "begin"}', *lines]) + "\n")


def test_losses_are_compared_with_the_cpu(tmp_path: Path) -> None:
    """Fewer losses, a difference above the tolerance, or a null loss fail."""
    write_losses(tmp_path / "cpu", [6.0, 5.0])
    write_losses(tmp_path / "near", [6.0, 5.0 * (1 + 0.9 * verify_device.TOLERANCE)])
    write_losses(tmp_path / "far", [6.0, 5.0 * (1 + 1.1 * verify_device.TOLERANCE)])
    write_losses(tmp_path / "short", [6.0])
    write_losses(tmp_path / "null", [6.0, None])
    names = ("near", "far", "short", "null")
    verdicts = {name: compare(tmp_path, name)[0] for name in names}
    assert verdicts == {"near": True, "far": False, "short": False, "null": False}


def test_a_part_that_fails_or_hangs_affects_only_itself(tmp_path: Path) -> None:
    """Its exit code and output are reported, and the next part runs."""
    failed = perform(Part("fails", (sys.executable, "-c", "print('why'); exit(3)"), 60), tmp_path)
    assert (failed.held, failed.code, failed.output.strip()) == (False, 3, "why")
    no_input = perform(Part("hangs", (sys.executable, "-c", "input(); print()"), 60), tmp_path)
    assert not no_input.held
    timed_out = perform(Part("late", (sys.executable, "-c", "while True: pass"), 0.5), tmp_path)
    assert (timed_out.held, timed_out.code) == (False, None)


def test_a_part_that_times_out_can_stop_its_own_processes(tmp_path: Path) -> None:
    """SIGTERM comes first: a killed torchrun would leave its workers on the device."""
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('workers ended')))\n"
        "time.sleep(60)"
    )
    timed_out = perform(Part("late", (sys.executable, "-c", code), 2), tmp_path)
    assert (timed_out.held, timed_out.code, timed_out.output.strip()) == (
        False,
        None,
        "workers ended",
    )


def test_every_axis_runs_on_several_devices_and_none_on_one() -> None:
    """Axes need enough devices; benchmarks and tests run only without --quick."""
    on_eight = [part.name for part in parts_of("npu", 8, quick=True)]
    assert {f"npu, {axis}" for axis in ("data=8", "tensor=2", "pipeline=2", "context=2")} < {
        *on_eight
    }
    assert {"npu, data=2, expert=2", "npu, data=2, pipeline=2, tensor=2"} < {*on_eight}
    assert not any("=" in part.name for part in parts_of("npu", 1, quick=True))
    on_two = [part.name for part in parts_of("npu", 2, quick=True)]
    assert "npu, data=2, expert=2" in on_two
    assert "npu, data=2, tensor=2" not in on_two
    with_tests = [part.name for part in parts_of("npu", 1, quick=False)]
    measurements = {"training, 1B Llama", "operators, speed", "generation", "recorder, speed"}
    assert {"tests of ms-kernels", *measurements} < {*with_tests}


def test_every_unverified_feature_has_a_part() -> None:
    """bfloat16, kill and resume, experts, SFT, PPO, QAT and recording."""
    names = {part.name for part in parts_of("npu", 1, quick=True)}
    assert {
        *("npu, bfloat16", "npu, ms-kernels", "npu, killed and resumed", "npu, experts"),
        *("npu, SFT", "npu, PPO", "npu, quantized weights", "npu, recorded"),
    } <= names


def test_a_repeated_step_counts_once(tmp_path: Path) -> None:
    """After a kill, the later loss is the resumed run's."""
    write_losses(tmp_path / "cpu", [6.0, 5.0])
    write_losses(tmp_path / "killed", [6.0, 9.0])
    with (tmp_path / "killed" / "events.jsonl").open("a") as events:
        events.write(json.dumps({"kind": "step", "step": 2, "loss": 5.0}) + "\n")
    assert compare(tmp_path, "killed")[0]


def test_a_missing_device_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit code 2, and no files are written."""
    monkeypatch.setattr(sys, "argv", ["v", "--out", str(tmp_path / "out"), "--device", "nowhere"])
    assert main() == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_dependency_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is named before any part runs."""
    monkeypatch.setattr(verify_device, "is_installed", lambda name: name != "xxhash")
    monkeypatch.setattr(sys, "argv", ["v", "--out", str(tmp_path / "out")])
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "not installed in this Python: xxhash;" in line


def test_the_page_lists_failures_parts_that_did_not_run_and_the_files_to_send(
    tmp_path: Path,
) -> None:
    """Failures come first, with their output."""
    report = Report(
        tmp_path,
        facts("cpu", 2),
        planned=["one", "two", "three"],
        excluded=["benchmarks: they need an accelerator"],
        command="python tools/verify_device.py --out report",
        started=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
    )
    report.add(Outcome("one", "a fact", True, 1.0, 0, "fine", "exact"))
    assert not report.all_passed()
    report.add(Outcome("two", "another fact", False, 2.0, 3, "why", "exit code 3"))
    page = (tmp_path / "report.md").read_text()
    assert page.startswith("# 2 x CPU: 1 of 3 parts passed; 1 not run\n")
    assert "Failed:\n\n- two: exit code 3\n" in page
    assert "Not run:\n\n- three\n" in page
    assert "Excluded:\n\n- benchmarks: they need an accelerator\n" in page
    assert "started 2026-01-02 03:04 UTC, 3 s total" in page
    assert "| one | a fact | yes | 1 | exact |" in page
    assert page.index("## two (failed)") < page.index("## one")
    assert "report.json" in page.partition("## What to send")[2].partition("##")[0]
    record = json.loads((tmp_path / "report.json").read_text())
    assert record["facts"]["torch"]
    assert record["not_run"] == ["three"]
    assert [outcome["output"] for outcome in record["outcomes"]] == ["fine", "why"]


def test_every_part_states_its_claim_and_excluded_parts_their_reason() -> None:
    """Readers of the page need not know the script."""
    for count in (1, 8):
        assert [part.name for part in parts_of("npu", count, quick=False) if not part.shows] == []
    excluded = list(excluded_parts("npu", 1, quick=True))
    assert "layouts and links: only one device" in excluded
    assert "tests that need a device, and benchmarks: --quick" in excluded


def test_a_budget_stops_only_slow_parts_and_their_dependents(tmp_path: Path) -> None:
    """Each part gets at most half of the remaining time; stopped parts count as not run."""
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
        excluded=[],
        command="x",
        started=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
    )
    run_parts(parts, report, tmp_path, budget_s=6)
    record = json.loads((tmp_path / "report.json").read_text())
    assert [(outcome["name"], outcome["held"]) for outcome in record["outcomes"]] == [
        ("quick", True)
    ]
    assert record["not_run"] == ["slow", "needs it"]
    assert not report.all_passed()


def test_checks_run_side_by_side_and_measurements_alone(tmp_path: Path) -> None:
    """Two checks wait for each other's file; a measurement finds that no other part runs."""
    meet = "import sys, time, pathlib as p; p.Path(sys.argv[1]).touch()\n" + (
        "while not p.Path(sys.argv[2]).exists(): time.sleep(0.01)\nprint('met')"
    )
    alone = (
        "import sys, time, pathlib as p; p.Path('busy').touch(exist_ok=False); time.sleep(0.2)\n"
        "p.Path('busy').unlink(); print('| method | 3 ms |')"
    )
    parts = [
        Part("timed", (sys.executable, "-c", alone), 60, is_measurement=True),
        Part("timed again", (sys.executable, "-c", alone), 60, is_measurement=True),
        Part("first", (sys.executable, "-c", meet, "a", "b"), 60),
        Part("second", (sys.executable, "-c", meet, "b", "a"), 60),
        Part("third", (sys.executable, "-c", "print(open('a'))"), 60, needs=("second",)),
    ]
    work = tmp_path / "work"
    work.mkdir()
    report = Report(
        tmp_path,
        facts("cpu", 1),
        planned=[part.name for part in parts],
        excluded=[],
        command="x",
        started=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
    )
    run_parts(parts, report, work, jobs=2)
    assert report.all_passed()
    assert [outcome.name for outcome in report.outcomes][-2:] == ["timed", "timed again"]
    assert (tmp_path / "figures.md").read_text().split("\n\n") == [
        "\n## timed",
        "| method | 3 ms |",
        "## timed again",
        "| method | 3 ms |\n",
    ]
    assert "| method | 3 ms |" in report.summary()


def test_selected_parts_include_the_parts_they_need() -> None:
    """`--only` matches part of a name."""
    parts = tuple(parts_of("cuda", 1, quick=False))
    names = [part.name for part in verify_device.select(parts, ["SFT", "generation"])]
    assert names == ["CPU, one process", "conversations", "CPU, SFT", "cuda, SFT", "generation"]
    assert verify_device.select(parts, ["nothing"]) == ()


def test_parts_come_after_the_parts_they_need() -> None:
    """A budget then cuts off dependents, never their dependencies."""
    for device, count in (("cpu", 2), ("cuda", 8)):
        seen: set[str] = set()
        for part in parts_of(device, count, quick=False):
            assert {*part.needs} <= seen, part.name
            seen.add(part.name)


@pytest.mark.slow
def test_all_parts_pass_on_the_cpu(tmp_path: Path) -> None:
    """With --quick and two processes, every part passes and the report says so."""
    script = str(Path(verify_device.__file__))
    out = tmp_path / "report"
    command = [sys.executable, script, "--out", str(out), "--device", "cpu", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((out / "report.json").read_text())
    assert all(part["held"] for part in record["outcomes"])
    assert record["not_run"] == []
    assert "processes: losses of six steps" in (out / "report.md").read_text()
