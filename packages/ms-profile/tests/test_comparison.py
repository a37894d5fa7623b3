"""Comparing runs: equal ones differ seldom, slower ones are found."""

import json
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from simulation import Fault, simulate_run

from ms_profile.analysis.comparison import (
    LEAST_CHANGE,
    SIGNIFICANCE,
    RecordedSteps,
    compare,
    compare_runs,
    recorded_steps,
    step_times,
)
from ms_profile.analysis.whole_run import analyse_traces
from ms_profile.cli import main
from ms_profile.errors import TraceError
from ms_profile.log.event_log import EventLog
from ms_profile.log.manifest import RunManifest, TraceSchedule, encode, write_whole


def step_series(random: np.random.Generator, steps: int, scale: float = 1.0) -> np.ndarray:
    """Step times with neighbors alike (correlation 0.5), a skewed spread of 5% and outliers."""
    noise = np.zeros(steps)
    for at in range(1, steps):
        noise[at] = 0.5 * noise[at - 1] + random.normal(0, 0.043)
    times: np.ndarray = 50e6 * scale * np.exp(noise)
    times[random.random(steps) < 0.03] *= 3
    return times


@pytest.mark.parametrize("steps", [8, 16, 40])
def test_equal_runs_are_called_a_regression_in_at_most_five_percent(steps: int) -> None:
    """At most 5% of 400 A/A pairs that also differ by 1% from run to run are called slower."""
    random = np.random.default_rng(steps)
    called = 0
    for _ in range(400):
        runs = [step_series(random, steps, float(random.normal(1, 0.01))) for _ in range(2)]
        change = float(np.median(runs[1]) / np.median(runs[0])) - 1
        called += compare_runs([runs[0]], [runs[1]]) < SIGNIFICANCE and change >= LEAST_CHANGE
    assert called <= 20


@pytest.mark.parametrize(("steps", "slower"), [(8, 1.4), (16, 1.2), (40, 1.15)])
def test_slower_runs_are_found(steps: int, slower: float) -> None:
    """A slow-down well above the noise is called in at least 90% of pairs."""
    random = np.random.default_rng(steps)
    called = 0
    for _ in range(100):
        before, after = step_series(random, steps), step_series(random, steps, slower)
        change = float(np.median(after) / np.median(before)) - 1
        called += compare_runs([before], [after]) < SIGNIFICANCE and change >= LEAST_CHANGE
    assert called >= 90


def test_a_comparison_names_the_phase_that_moved() -> None:
    """A run whose data takes 20 ms more is slower, and the change is in "data" and its operator."""
    before = analyse_traces(simulate_run(ranks=2, seed=1).traces)
    fault = Fault(phase="data", rank=0, delay_ns=20_000_000)
    after = analyse_traces(simulate_run(ranks=2, seed=2, fault=fault).traces)
    found = compare(before, after)
    assert found.regression
    assert not found.improvement
    assert found.p_value < SIGNIFICANCE
    moved = {one.name: one.after_ns - one.before_ns for one in found.phases}
    assert moved["data"] == pytest.approx(10e6, rel=0.05)
    assert "DataLoader" in found.operators[0].name or "all_reduce" in found.operators[0].name
    assert compare(after, before).improvement


def test_a_phase_that_one_run_cannot_show_is_named() -> None:
    """What is missing from either run's traces is no change, and is not left out in silence."""
    before = analyse_traces(simulate_run(ranks=2, seed=1).traces)
    assert "data" not in compare(before, before).not_measurable
    after = analyse_traces(simulate_run(ranks=2, seed=2).traces)
    ranks = {
        rank: evolve(one, activity=evolve(one.activity, unmeasured=("data",)))
        for rank, one in after.ranks.items()
    }
    found = compare(before, evolve(after, ranks=ranks))
    assert "data" in found.not_measurable
    assert "data" not in {one.name for one in found.phases}


def test_too_few_steps_are_refused() -> None:
    """Three steps cannot tell a change from chance: an error says how many there are."""
    short = analyse_traces(simulate_run(ranks=2, steps=3).traces)
    with pytest.raises(TraceError, match="at least 4 named steps per run, got 3"):
        step_times(short)


def steps_of(wall_ns: np.ndarray, without_cpu_wait_ns: np.ndarray | None = None) -> RecordedSteps:
    """Steps as a log would have them."""
    return RecordedSteps(wall_ns=wall_ns, without_cpu_wait_ns=without_cpu_wait_ns)


def test_waiting_for_a_cpu_is_no_regression() -> None:
    """Steps longer only by their wait for a CPU are not called; longer without it, they are."""
    random = np.random.default_rng(0)
    analysis = analyse_traces(simulate_run(ranks=2, seed=1).traces)
    usual, again, slower = (step_series(random, 40, scale) for scale in (1, 1, 1.3))
    before = steps_of(usual, usual)
    assert not compare(
        analysis, analysis, recorded=([before], [steps_of(slower, again)])
    ).regression
    assert compare(analysis, analysis, recorded=([before], [steps_of(slower, slower)])).regression


def log_run(
    folder: Path, times_s: list[float], traced: range, cpu_wait_share: float | None = None
) -> None:
    """A run's folder with nothing but its manifest and the log of two ranks."""
    run = RunManifest(
        world_size=2, metrics=("idle",), script="train.py", started_wall_ns=0,
        schedule=TraceSchedule(skip=2), versions={},
    )  # fmt: skip
    write_whole(folder / "manifest.json", encode(run))
    for rank in range(2):
        with EventLog(folder / "events", rank=rank) as log:
            for step, time_s in enumerate(times_s):
                fields = {"step": step, "step_time_s": time_s * (1 + rank)}
                if cpu_wait_share is not None:
                    fields["cpu_wait_s"] = cpu_wait_share * fields["step_time_s"]
                log("step", fields | ({"traced": 1} if step in traced else {}))


def test_the_steps_of_a_runs_log_are_compared_but_for_those_that_were_slowed(
    tmp_path: Path,
) -> None:
    """Steps 0 and 1 warm up, 4 to 6 were traced; of the rest the slower rank's time counts."""
    log_run(tmp_path, [9.0, 9.0, *(0.1 * n for n in range(2, 10))], range(4, 7))
    found = recorded_steps(tmp_path)
    assert found is not None
    assert (found.wall_ns / 1e9).tolist() == pytest.approx([0.4, 0.6, 1.4, 1.6, 1.8])
    assert found.without_cpu_wait_ns is None
    assert recorded_steps(tmp_path / "nowhere") is None
    problems: list[str] = []
    (tmp_path / "manifest.json").write_text("{")
    assert recorded_steps(tmp_path, on_problem=problems.append) is None
    assert "manifest.json" in problems[0]


def test_runs_of_a_busy_host_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where ranks waited for a CPU half of the time, nothing can be said, and that is said."""
    log_run(tmp_path, [0.1] * 12, range(0), cpu_wait_share=0.5)
    found = recorded_steps(tmp_path)
    assert found is not None
    assert found.cpu_wait_share == pytest.approx(0.5)
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "not measurable" in said
    assert "waited for a CPU 50% of the time" in said


@pytest.mark.parametrize("steps", [16, 40, 100])
def test_what_is_said_to_be_found_in_nine_of_ten_is(steps: int) -> None:
    """Runs slower by as much as `detectable` says are called in at least 85% of pairs."""
    random = np.random.default_rng(steps)
    analysis = analyse_traces(simulate_run(ranks=2, seed=1).traces)
    called = 0
    for _ in range(100):
        before, again = step_series(random, steps), step_series(random, steps)
        shift = compare(
            analysis, analysis, recorded=([steps_of(before)], [steps_of(again)])
        ).detectable
        assert shift is not None
        # At the least change itself half of the pairs fall short of it.
        after = step_series(random, steps, 1 + max(shift, 2 * LEAST_CHANGE))
        called += compare(
            analysis, analysis, recorded=([steps_of(before)], [steps_of(after)])
        ).regression
    assert called >= 85


def test_too_few_steps_promise_nothing() -> None:
    """Four and four steps that differ widely show no slow-down surely: None, not a huge number."""
    analysis = analyse_traces(simulate_run(ranks=2, seed=1).traces)
    wild = np.array([1.0, 2.0, 4.0, 8.0])
    assert (
        compare(analysis, analysis, recorded=([steps_of(wild)], [steps_of(wild)])).detectable
        is None
    )


def scattered(random: np.random.Generator, runs: int, scale: float, apart: float) -> list:
    """Step times of several runs, whose pace differs from run to run."""
    return [step_series(random, 40, scale * float(random.normal(1, apart))) for _ in range(runs)]


def is_called(before: list, after: list) -> bool:
    """As `compare` calls a regression."""
    pace = [float(np.mean(np.log([np.median(run) for run in runs]))) for runs in (before, after)]
    change = float(np.expm1(pace[1] - pace[0]))
    return change >= LEAST_CHANGE and compare_runs(before, after) < SIGNIFICANCE


@pytest.mark.parametrize("runs", [2, 3, 5])
def test_runs_that_scatter_are_called_a_regression_in_at_most_five_percent(runs: int) -> None:
    """Equal runs that lie 15% apart, each of steps much alike: at most 5% of 200 are called."""
    random = np.random.default_rng(runs)
    called = alone = 0
    for _ in range(200):
        before, after = (scattered(random, runs, 1.0, 0.15) for _ in range(2))
        called += is_called(before, after)
        alone += is_called(before[:1], after[:1])
    assert called <= 10
    assert alone > 20  # one run of each cannot know that runs scatter so


def test_several_runs_find_what_their_scatter_lets_them() -> None:
    """Three runs of each that lie 3% apart: 20% slower is called in at least 90 of 100."""
    random = np.random.default_rng(0)
    called = 0
    for _ in range(100):
        before, after = (scattered(random, 3, scale, 0.03) for scale in (1.0, 1.2))
        called += is_called(before, after)
    assert called >= 90


def test_three_runs_find_a_tenth_that_one_cannot_tell_from_a_slower_run() -> None:
    """Runs of one pace, 40 steps, 10% slower: 90 of 100 by three of each; one of each finds fewer.

    One run of each allows for 2.5% from run to run, and pays for it in power.
    """
    random = np.random.default_rng(40)
    several = alone = 0
    for _ in range(100):
        before, after = (scattered(random, 3, scale, 0.0) for scale in (1.0, 1.1))
        several += is_called(before, after)
        alone += is_called(before[:1], after[:1])
    assert several >= 90
    assert alone < several


def test_more_runs_are_named_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several runs of a busy host are compared, a folder that is no run is named."""
    traces = Path(__file__).parent / "traces" / "ddp"
    for number in range(4):
        folder = tmp_path / f"run{number}"
        log_run(folder, [0.1 + 0.001 * number] * 12, range(0), cpu_wait_share=0.5)
        (folder / "traces").mkdir()
        for rank in range(2):
            there = folder / "traces" / f"rank-0000{rank}.000.json.gz"
            there.write_bytes((traces / f"rank-0000{rank}.json.gz").read_bytes())
    first, second, third, fourth = (str(tmp_path / f"run{number}") for number in range(4))
    more = ["--before", third, "--after", fourth]
    assert main(["compare", first, second, *more]) == 0
    assert "20 and 20 steps of 2 and 2 runs" in capsys.readouterr().out  # two warm up in each
    assert main(["compare", first, second, "--after", str(tmp_path)]) == 2
    assert "must be a run with a log" in capsys.readouterr().err


def test_too_few_steps_for_any_certainty_are_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four steps, unlike one another: compared, with the remedy in place of a number."""
    for name, lengths in (("a", (0.1, 0.9, 0.2, 0.5)), ("b", (0.2, 0.8, 0.1, 0.6))):
        events = [
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}", "pid": 1,
             "tid": 1, "ts": 1e6 * number, "dur": length * 1e6}
            for number, length in enumerate(lengths)
        ]  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps({"traceEvents": events}))
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert "to detect any slowdown reliably; record more" in capsys.readouterr().out


def write_steps(path: Path, lengths_ms: list[float]) -> str:
    """Write a trace of steps of these lengths, and return its path."""
    events: list[dict[str, object]] = []
    at = 0.0
    for number, length in enumerate(lengths_ms):
        step = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}"}
        events += [{**step, "pid": 1, "tid": 1, "ts": at, "dur": 1e3 * length}]
        events += [{**step, "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": at,
                    "dur": 800 * length}]  # fmt: skip
        at += 1e3 * length + 10
    path.write_text(json.dumps({"traceEvents": events}))
    return str(path)


@pytest.mark.parametrize(
    ("before", "after", "verdict", "most_percent"),
    [
        ([347.0, 351.0, 345.0, 349.0] * 3, [216.0, 214.0, 218.0, 215.0] * 3,
         "significant improvement: -3", 2),
        ([216.0, 214.0, 218.0, 215.0] * 3, [347.0, 351.0, 345.0, 349.0] * 3,
         "significant regression: +6", 2),
        ([75.5, 76.9, 76.2, 76.7, 78.5, 81.1], [100.3, 122.1, 166.4, 82.0, 107.2, 166.3],
         "inconclusive", 50),
        ([166.3, 107.2, 82.0, 166.4, 122.1, 100.3], [81.1, 78.5, 76.7, 76.2, 76.9, 75.5],
         "inconclusive", 50),
        ([100.0, 101.0, 99.0, 100.0], [100.0, 101.5, 99.0, 100.2], "no significant difference", 60),
    ],
)  # fmt: skip
def test_the_sentence_agrees_with_its_numbers(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    before: list[float],
    after: list[float],
    verdict: str,
    most_percent: float,
) -> None:
    """The probability is that of the direction that was seen; a large change is never "none"."""
    code = main(
        [
            "compare",
            write_steps(tmp_path / "a.json", before),
            write_steps(tmp_path / "b.json", after),
        ]
    )
    line = next(each for each in capsys.readouterr().out.splitlines() if " of cases" in each)
    assert line.startswith(verdict)
    way = "faster" if np.median(after) < np.median(before) else "slower"
    assert f"equal runs get {way} by at least this much" in line
    assert float(line.split(" in ")[1].split("%")[0]) <= most_percent
    assert code == (1 if "regression" in verdict else 0)
