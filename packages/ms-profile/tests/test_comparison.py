"""Comparing runs: equal ones differ seldom, slower ones are found."""

import numpy as np
import pytest

from ms_profile.analysis import analyse_traces
from ms_profile.comparison import CHANCE, LEAST_CHANGE, compare, compare_steps, step_times
from ms_profile.errors import TraceError
from ms_profile.simulation import simulate_run


def step_series(random: np.random.Generator, steps: int, scale: float = 1.0) -> np.ndarray:
    """Step times with neighbours alike (correlation 0.5), a skewed spread of 5% and outliers."""
    noise = np.zeros(steps)
    for at in range(1, steps):
        noise[at] = 0.5 * noise[at - 1] + random.normal(0, 0.043)
    times: np.ndarray = 50e6 * scale * np.exp(noise)
    times[random.random(steps) < 0.03] *= 3
    return times


@pytest.mark.parametrize("steps", [8, 16, 40])
def test_equal_runs_are_called_a_regression_in_at_most_five_percent(steps: int) -> None:
    """Of 400 A/A pairs that also differ by 1% from run to run, at most 5% are called slower."""
    random = np.random.default_rng(steps)
    called = 0
    for _ in range(400):
        runs = [step_series(random, steps, float(random.normal(1, 0.01))) for _ in range(2)]
        change = float(np.median(runs[1]) / np.median(runs[0])) - 1
        called += compare_steps(runs[0], runs[1]) < CHANCE and change >= LEAST_CHANGE
    assert called <= 20


@pytest.mark.parametrize(("steps", "slower"), [(8, 1.4), (16, 1.2), (40, 1.1)])
def test_slower_runs_are_found(steps: int, slower: float) -> None:
    """A slow-down well above the noise is called in at least 90% of pairs."""
    random = np.random.default_rng(steps)
    called = 0
    for _ in range(100):
        before, after = step_series(random, steps), step_series(random, steps, slower)
        change = float(np.median(after) / np.median(before)) - 1
        called += compare_steps(before, after) < CHANCE and change >= LEAST_CHANGE
    assert called >= 90


def test_a_comparison_names_the_phase_that_moved() -> None:
    """A run whose data takes 20 ms more is slower, and the change is in "data" and its operator."""
    from ms_profile.simulation import Fault

    before = analyse_traces(simulate_run(ranks=2, seed=1).traces)
    fault = Fault(phase="data", rank=0, delay_ns=20_000_000)
    after = analyse_traces(simulate_run(ranks=2, seed=2, fault=fault).traces)
    found = compare(before, after)
    assert found.regression
    assert not found.improvement
    assert found.chance < CHANCE
    moved = {one.name: one.after_ns - one.before_ns for one in found.phases}
    assert moved["data"] == pytest.approx(10e6, rel=0.05)
    assert "DataLoader" in found.operators[0].name or "all_reduce" in found.operators[0].name
    assert compare(after, before).improvement


def test_too_few_steps_are_refused() -> None:
    """Three steps cannot tell a change from chance: an error says how many there are."""
    short = analyse_traces(simulate_run(ranks=2, steps=3).traces)
    with pytest.raises(TraceError, match="has 3 named steps"):
        step_times(short)
