"""Comparing runs: few false alarms for equal runs, and slower runs are detected."""

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
from ms_profile.log.manifest import RunManifest, TraceSchedule, encode, write_atomically


def step_series(random: np.random.Generator, steps: int, scale: float = 1.0) -> np.ndarray:
    """Return step times with autocorrelation 0.5, a skewed spread of 5% and outliers."""
    noise = np.zeros(steps)
    for index in range(1, steps):
        noise[index] = 0.5 * noise[index - 1] + random.normal(0, 0.043)
    times: np.ndarray = 50e6 * scale * np.exp(noise)
    times[random.random(steps) < 0.03] *= 3
    return times


@pytest.mark.parametrize("steps", [8, 16, 40])
def test_equal_runs_are_reported_as_regressions_in_at_most_5_percent(steps: int) -> None:
    """At most 5% of 400 A/A pairs are called slower when runs also vary by 1%."""
    random = np.random.default_rng(steps)
    regressions = 0
    for _ in range(400):
        runs = [step_series(random, steps, float(random.normal(1, 0.01))) for _ in range(2)]
        change = float(np.median(runs[1]) / np.median(runs[0])) - 1
        regressions += compare_runs([runs[0]], [runs[1]]) < SIGNIFICANCE and change >= LEAST_CHANGE
    assert regressions <= 20


@pytest.mark.parametrize(("steps", "slower"), [(8, 1.4), (16, 1.2), (40, 1.15)])
def test_slower_runs_are_detected(steps: int, slower: float) -> None:
    """A slowdown well above the noise is detected in at least 90% of pairs."""
    random = np.random.default_rng(steps)
    regressions = 0
    for _ in range(100):
        before, after = step_series(random, steps), step_series(random, steps, slower)
        change = float(np.median(after) / np.median(before)) - 1
        regressions += compare_runs([before], [after]) < SIGNIFICANCE and change >= LEAST_CHANGE
    assert regressions >= 90


def test_a_comparison_names_the_changed_phase() -> None:
    """If data takes 20 ms longer, the change appears in "data" and its operator."""
    before = analyse_traces(simulate_run(ranks=2, seed=1).traces)
    fault = Fault(phase="data", rank=0, delay_ns=20_000_000)
    after = analyse_traces(simulate_run(ranks=2, seed=2, fault=fault).traces)
    comparison = compare(before, after)
    assert comparison.regression
    assert not comparison.improvement
    assert comparison.p_value < SIGNIFICANCE
    changes = {phase.name: phase.after_ns - phase.before_ns for phase in comparison.phases}
    assert changes["data"] == pytest.approx(10e6, rel=0.05)
    assert (
        "DataLoader" in comparison.operators[0].name or "all_reduce" in comparison.operators[0].name
    )
    assert compare(after, before).improvement


def test_a_phase_missing_in_one_run_is_named() -> None:
    """Data missing from either run's traces is not a change, and not silently dropped."""
    before = analyse_traces(simulate_run(ranks=2, seed=1).traces)
    assert "data" not in compare(before, before).not_measurable
    after = analyse_traces(simulate_run(ranks=2, seed=2).traces)
    ranks = {
        rank: evolve(rank_analysis, activity=evolve(rank_analysis.activity, unmeasured=("data",)))
        for rank, rank_analysis in after.ranks.items()
    }
    comparison = compare(before, evolve(after, ranks=ranks))
    assert "data" in comparison.not_measurable
    assert "data" not in {phase.name for phase in comparison.phases}


def test_too_few_steps_are_refused() -> None:
    """Three steps cannot separate a change from noise; the error has the number of steps."""
    short = analyse_traces(simulate_run(ranks=2, steps=3).traces)
    with pytest.raises(TraceError, match="at least 4 named steps per run, got 3"):
        step_times(short)


def steps_of(wall_ns: np.ndarray, without_cpu_wait_ns: np.ndarray | None = None) -> RecordedSteps:
    """Return steps as read from a log."""
    return RecordedSteps(wall_ns=wall_ns, without_cpu_wait_ns=without_cpu_wait_ns)


def test_waiting_for_a_cpu_is_not_a_regression() -> None:
    """Steps longer only because of CPU waits are not a regression; otherwise they are."""
    random = np.random.default_rng(0)
    analysis = analyse_traces(simulate_run(ranks=2, seed=1).traces)
    baseline, repeated, slower = (step_series(random, 40, scale) for scale in (1, 1, 1.3))
    before = steps_of(baseline, baseline)
    assert not compare(
        analysis, analysis, recorded=([before], [steps_of(slower, repeated)])
    ).regression
    assert compare(analysis, analysis, recorded=([before], [steps_of(slower, slower)])).regression


def log_run(
    folder: Path, times_s: list[float], traced: range, cpu_wait_share: float | None = None
) -> None:
    """Write a run folder with only a manifest and the logs of two ranks."""
    run = RunManifest(
        world_size=2, metrics=("idle",), script="train.py", started_wall_ns=0,
        schedule=TraceSchedule(skip=2), versions={},
    )  # fmt: skip
    write_atomically(folder / "manifest.json", encode(run))
    for rank in range(2):
        with EventLog(folder / "events", rank=rank) as log:
            for step, time_s in enumerate(times_s):
                fields = {"step": step, "step_time_s": time_s * (1 + rank)}
                if cpu_wait_share is not None:
                    fields["cpu_wait_s"] = cpu_wait_share * fields["step_time_s"]
                log("step", fields | ({"traced": 1} if step in traced else {}))


def test_logged_steps_exclude_warmup_and_traced_ones(
    tmp_path: Path,
) -> None:
    """Steps 0 and 1 are warmup, 4 to 6 were traced; for the rest the slower rank counts."""
    log_run(tmp_path, [9.0, 9.0, *(0.1 * n for n in range(2, 10))], range(4, 7))
    recorded = recorded_steps(tmp_path)
    assert recorded is not None
    assert (recorded.wall_ns / 1e9).tolist() == pytest.approx([0.4, 0.6, 1.4, 1.6, 1.8])
    assert recorded.without_cpu_wait_ns is None
    assert recorded_steps(tmp_path / "nowhere") is None
    problems: list[str] = []
    (tmp_path / "manifest.json").write_text("{")
    assert recorded_steps(tmp_path, on_problem=problems.append) is None
    assert "manifest.json" in problems[0]


def test_runs_of_a_busy_host_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If ranks waited for a CPU half of the time, the result is reported as not measurable."""
    log_run(tmp_path, [0.1] * 12, range(0), cpu_wait_share=0.5)
    recorded = recorded_steps(tmp_path)
    assert recorded is not None
    assert recorded.cpu_wait_share == pytest.approx(0.5)
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "not measurable" in error
    assert "waited for a CPU 50% of the time" in error


@pytest.mark.parametrize("steps", [16, 40, 100])
def test_slowdowns_of_the_detectable_size_are_detected(steps: int) -> None:
    """Runs slower by `detectable` are reported in at least 85% of pairs."""
    random = np.random.default_rng(steps)
    analysis = analyse_traces(simulate_run(ranks=2, seed=1).traces)
    regressions = 0
    for _ in range(100):
        before, repeated = step_series(random, steps), step_series(random, steps)
        shift = compare(
            analysis, analysis, recorded=([steps_of(before)], [steps_of(repeated)])
        ).detectable
        assert shift is not None
        # At exactly the least change, half of the pairs fall below it.
        after = step_series(random, steps, 1 + max(shift, 2 * LEAST_CHANGE))
        regressions += compare(
            analysis, analysis, recorded=([steps_of(before)], [steps_of(after)])
        ).regression
    assert regressions >= 85


def test_too_few_steps_have_no_detectable_size() -> None:
    """Four widely varying steps cannot detect any slowdown: None instead of a huge number."""
    analysis = analyse_traces(simulate_run(ranks=2, seed=1).traces)
    scattered_steps = np.array([1.0, 2.0, 4.0, 8.0])
    assert (
        compare(
            analysis, analysis, recorded=([steps_of(scattered_steps)], [steps_of(scattered_steps)])
        ).detectable
        is None
    )


def varied_runs(random: np.random.Generator, runs: int, scale: float, spread: float) -> list:
    """Return step times of several runs whose pace varies from run to run."""
    return [step_series(random, 40, scale * float(random.normal(1, spread))) for _ in range(runs)]


def is_regression(before: list, after: list) -> bool:
    """Return whether `compare` would report a regression."""
    pace = [float(np.mean(np.log([np.median(run) for run in runs]))) for runs in (before, after)]
    change = float(np.expm1(pace[1] - pace[0]))
    return change >= LEAST_CHANGE and compare_runs(before, after) < SIGNIFICANCE


@pytest.mark.parametrize("runs", [2, 3, 5])
def test_varying_runs_are_reported_as_regressions_in_at_most_5_percent(runs: int) -> None:
    """Equal runs that vary by 15%, with similar steps: at most 5% of 200 are reported."""
    random = np.random.default_rng(runs)
    regressions = single_run_regressions = 0
    for _ in range(200):
        before, after = (varied_runs(random, runs, 1.0, 0.15) for _ in range(2))
        regressions += is_regression(before, after)
        single_run_regressions += is_regression(before[:1], after[:1])
    assert regressions <= 10
    assert single_run_regressions > 20  # a single run cannot reveal its variation


def test_several_runs_detect_slowdowns_above_their_variation() -> None:
    """Three runs each that vary by 3%: 20% slower is detected in at least 90 of 100."""
    random = np.random.default_rng(0)
    regressions = 0
    for _ in range(100):
        before, after = (varied_runs(random, 3, scale, 0.03) for scale in (1.0, 1.2))
        regressions += is_regression(before, after)
    assert regressions >= 90


def test_three_runs_detect_ten_percent_better_than_one() -> None:
    """At equal pace, 40 steps and 10% slower, three runs each detect at least 90 of 100.

    A single run must allow for 2.5% of variation between runs, which costs power.
    """
    random = np.random.default_rng(40)
    three_run_hits = single_run_hits = 0
    for _ in range(100):
        before, after = (varied_runs(random, 3, scale, 0.0) for scale in (1.0, 1.1))
        three_run_hits += is_regression(before, after)
        single_run_hits += is_regression(before[:1], after[:1])
    assert three_run_hits >= 90
    assert single_run_hits < three_run_hits


def test_several_runs_can_be_compared_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several runs of a busy host are compared; a folder that is not a run is named."""
    traces = Path(__file__).parent / "traces" / "ddp"
    for number in range(4):
        folder = tmp_path / f"run{number}"
        log_run(folder, [0.1 + 0.001 * number] * 12, range(0), cpu_wait_share=0.5)
        (folder / "traces").mkdir()
        for rank in range(2):
            target = folder / "traces" / f"rank-0000{rank}.000.json.gz"
            target.write_bytes((traces / f"rank-0000{rank}.json.gz").read_bytes())
    first, second, third, fourth = (str(tmp_path / f"run{number}") for number in range(4))
    options = ["--before", third, "--after", fourth]
    assert main(["compare", first, second, *options]) == 0
    # The first two steps of every run are warmup.
    assert "20 and 20 steps of 2 and 2 runs" in capsys.readouterr().out
    assert main(["compare", first, second, "--after", str(tmp_path)]) == 2
    assert "must be a run with a log" in capsys.readouterr().err


def test_too_few_steps_for_any_certainty_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four very different steps are compared, with a remedy instead of a detectable size."""
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
    """Write a trace with steps of these lengths; return its path."""
    events: list[dict[str, object]] = []
    start_us = 0.0
    for number, length in enumerate(lengths_ms):
        step = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}"}
        events += [{**step, "pid": 1, "tid": 1, "ts": start_us, "dur": 1e3 * length}]
        events += [{**step, "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": start_us,
                    "dur": 800 * length}]  # fmt: skip
        start_us += 1e3 * length + 10
    path.write_text(json.dumps({"traceEvents": events}))
    return str(path)


@pytest.mark.parametrize(
    ("before", "after", "verdict", "max_percent"),
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
    max_percent: float,
) -> None:
    """The probability is for the observed direction; a large change is never called "none"."""
    code = main(
        [
            "compare",
            write_steps(tmp_path / "a.json", before),
            write_steps(tmp_path / "b.json", after),
        ]
    )
    line = next(text for text in capsys.readouterr().out.splitlines() if " of cases" in text)
    assert line.startswith(verdict)
    direction = "faster" if np.median(after) < np.median(before) else "slower"
    assert f"runs of equal speed get {direction} by at least this much" in line
    assert float(line.split(" in ")[1].split("%")[0]) <= max_percent
    assert code == (1 if "regression" in verdict else 0)
