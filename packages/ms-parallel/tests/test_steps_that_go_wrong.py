"""Skip, roll back or stop after nonfinite losses and gradients, or spikes."""

import math
from pathlib import Path
from typing import Any

import pytest
from launching import RUN, write_corpus
from processes import run_processes
from trouble_runs import SETTINGS, run_with_faults

from ms_parallel import DistributedTrainer
from ms_parallel.cluster.layout import Layout
from ms_parallel.training.recovery import ROLL_BACKS, RecoveryPolicy

RUNS = Path(__file__).parent / "trouble_runs.py"
SPIKE, NOT_FINITE = 40.0, math.inf


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards built by one short run."""
    corpus = write_corpus(tmp_path_factory.mktemp("data") / "corpus")
    output = tmp_path_factory.mktemp("build") / "run"
    raw_text = {"vocab_size": RUN["vocab_size"], "held_out_fraction": 0.0}
    DistributedTrainer(**{**SETTINGS, **raw_text, "output_dir": output}).train(corpus, steps=1)
    return output / "shards"


def skipped_events(results: dict[str, Any]) -> list[tuple[int, str, str, int]]:
    """Step, reason, remedy and following step of each `skipped` event."""
    names = ("step", "reason", "remedy", "step_after")
    return [tuple(event[name] for name in names) for event in results["skipped"]]  # type: ignore[misc]


def test_a_spike_is_skipped(shards: Path, tmp_path: Path) -> None:
    """Before it changes weights; the update is counted, and the run continues."""
    result = run_with_faults(shards, tmp_path, {7: SPIKE}, on_spike="skip")
    assert skipped_events(result) == [(7, "refused", "skip", 7)]
    assert (result["updates"], result["counts"]) == (11, {"refused": 1})
    assert [step for step, _ in result["steps"]] == list(range(1, 13))


def test_a_roll_back_skips_the_batches_since_the_checkpoint(shards: Path, tmp_path: Path) -> None:
    """After a spike in batch 8 the run resumes at step 6 without batches 7 and 8."""
    result = run_with_faults(shards, tmp_path / "a", {8: SPIKE}, on_spike="roll_back")
    assert skipped_events(result) == [(8, "refused", "roll_back", 6)]
    assert [step for step, _ in result["steps"]] == [*range(1, 9), *range(7, 13)]
    assert (result["updates"], result["rolled_back"]) == (12, 1)
    other = DistributedTrainer(
        **{**SETTINGS, "output_dir": tmp_path / "b", "on_event": lambda *_: None}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ms_parallel.training.run.Run.take_steps", take_steps_without_spike)
        other.train(shards, steps=12)
    run = other._run
    assert run is not None
    assert result["weights"] == {
        name: parameter.detach().double().norm().item()
        for name, parameter in run.engine.parameters.items()
    }


def take_steps_without_spike(run: Any) -> bool:
    """Updates on batches 1 to 6 and 9 to 14."""
    from ms_parallel import NextTokenLoss

    for index in range(1, 15):
        batch = next(run.stream)
        if index not in (7, 8):
            run.engine.step(batch, NextTokenLoss(run.options.mtp_weight))
    return False


def test_a_run_that_dies_after_a_roll_back_ends_the_same(shards: Path, tmp_path: Path) -> None:
    """It rolls back again, with the same numbers, and skips the same batches."""
    settings = {"on_spike": "roll_back", "on_nonfinite": "skip"}
    planted = {8: SPIKE, 11: NOT_FINITE}
    uninterrupted = run_with_faults(shards, tmp_path / "a", planted, **settings)
    crashed = run_with_faults(shards, tmp_path / "b", planted, **settings, fails_at=8)
    assert crashed["error"] == "OSError: a crash of this test"
    resumed = run_with_faults(shards, tmp_path / "b", planted, **settings)
    assert resumed["weights"] == uninterrupted["weights"]
    assert (resumed["counts"], resumed["rolled_back"]) == (
        uninterrupted["counts"],
        uninterrupted["rolled_back"],
    )
    assert uninterrupted["counts"] == {"refused": 1, "nonfinite": 1}


def test_without_a_checkpoint_a_roll_back_skips(shards: Path, tmp_path: Path) -> None:
    """The run cannot return to a checkpoint yet."""
    result = run_with_faults(shards, tmp_path, {2: NOT_FINITE}, on_nonfinite="roll_back", steps=4)
    assert skipped_events(result) == [(2, "nonfinite", "skip", 2)]


def test_a_run_stops_on_request_and_keeps_its_checkpoints(shards: Path, tmp_path: Path) -> None:
    """Exit code 1 with one line; with another remedy the run resumes from the checkpoint."""
    result = run_with_faults(shards, tmp_path, {5: NOT_FINITE}, on_nonfinite="stop")
    assert result["error"].startswith("DivergenceError: step 5: gradient is not finite (loss inf")
    assert skipped_events(result) == [(5, "nonfinite", "stop", 5)]
    result = run_with_faults(shards, tmp_path, {5: NOT_FINITE}, on_nonfinite="skip")
    assert [step for step, _ in result["steps"]] == list(range(4, 13))


def test_a_run_that_only_rolls_back_is_ended(shards: Path, tmp_path: Path) -> None:
    """After a number of roll-backs to one checkpoint."""
    planted = dict.fromkeys(range(5, 100), NOT_FINITE)
    result = run_with_faults(shards, tmp_path, planted, on_nonfinite="roll_back")
    assert result["error"].startswith(f"DivergenceError: rolled back {ROLL_BACKS} times to one")
    assert result["rolled_back"] == ROLL_BACKS + 1


LAYOUTS = {
    1: ("data=1",),
    2: ("data=2", "tensor=2", "pipeline=2"),
    4: ("data=4", "tensor=4", "data=2,pipeline=2"),
}


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_skips_and_roll_backs_are_the_same_under_every_layout(
    shards: Path, tmp_path: Path, count: int
) -> None:
    """Steps, reasons and remedies on every process; losses are one process's.

    float32 sums in a different order differ by about 1e-7, amplified over a dozen steps.
    """
    planted = [(8, SPIKE), (11, NOT_FINITE)]
    heads = {"num_key_value_heads": 4} if count == 4 else {}

    def jobs_of(layouts: tuple[str, ...]) -> list[dict[str, Any]]:
        return [
            {
                "shards": str(shards),
                "output": str(tmp_path / layout),
                "planted": planted,
                "parallel_config": layout,
                "model_config": {**SETTINGS["model_config"], **heads},
                "on_spike": "roll_back",
                "on_nonfinite": "skip",
            }
            for layout in layouts
        ]

    (expected,) = run_processes(1, RUNS, "run_jobs", jobs=jobs_of(LAYOUTS[1]))[0]
    assert skipped_events(expected) == [(8, "refused", "roll_back", 6), (9, "nonfinite", "skip", 9)]
    ranks = run_processes(count, RUNS, "run_jobs", jobs=jobs_of(LAYOUTS[count]))
    for rank, results in enumerate(ranks):
        for layout, result in zip(LAYOUTS[count], results, strict=True):
            assert (result["counts"], result["updates"]) == (
                expected["counts"],
                expected["updates"],
            ), layout
            if rank:
                continue
            assert skipped_events(result) == skipped_events(expected), layout
            assert [s for s, _ in result["steps"]] == [s for s, _ in expected["steps"]]
            losses = [[loss for _, loss in course["steps"]] for course in (result, expected)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
            assert Layout.parse(layout).world_size == count


def test_a_roll_back_waits_for_a_checkpoint_in_progress(shards: Path, tmp_path: Path) -> None:
    """In the background as well: the spike comes one step after the checkpointed one."""
    settings = {"on_spike": "roll_back", "checkpoint_every": 6}
    blocking, background = (
        run_with_faults(
            shards, tmp_path / str(flag), {7: SPIKE}, **settings, async_checkpoints=flag
        )
        for flag in (False, True)
    )
    assert (
        skipped_events(background) == skipped_events(blocking) == [(7, "refused", "roll_back", 6)]
    )
    assert background["weights"] == blocking["weights"]
    assert background["steps"] == blocking["steps"]


def test_reproducible_runs_skip_and_roll_back_identically(shards: Path, tmp_path: Path) -> None:
    """Two data ranks skip and roll back like one process: losses and weights to the bit."""

    def course(count: int) -> dict[str, Any]:
        job = {
            "shards": str(shards),
            "output": str(tmp_path / str(count)),
            "planted": [(8, SPIKE), (11, NOT_FINITE)],
            "on_spike": "roll_back",
            "reproducible": True,
        }
        result: dict[str, Any] = run_processes(count, RUNS, "run_jobs", jobs=[job])[0][0]
        return result

    single, parallel = course(1), course(2)
    assert skipped_events(single) == [(8, "refused", "roll_back", 6), (9, "nonfinite", "skip", 9)]
    for key in ("steps", "skipped", "weights"):
        assert parallel[key] == single[key], key


def test_spikes_are_relative_to_the_spread_of_recent_values() -> None:
    """Relative to the spread of enough recent values, or to 1% if they are equal."""
    policy = RecoveryPolicy(on_nonfinite="skip", on_spike="skip", factor=10.0, window=4)
    assert not policy.is_spike(1e9, [1.0, 1.0, 1.0])
    assert policy.is_spike(1.2, [1.0] * 4)
    assert not policy.is_spike(1.05, [1.0] * 4)
    assert not policy.is_spike(15.0, [1.0, 3.0, 2.0, 5.0])
    limits = policy.limits([(1.0, 1.0)] * 4)
    assert limits.allow(1.0, 1.0)
    assert not limits.allow(1.0, 99.0)
