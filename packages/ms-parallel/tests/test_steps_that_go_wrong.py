"""What is done about losses and gradients that are not finite, or spikes: skip, roll back, stop."""

import math
from pathlib import Path
from typing import Any

import pytest
from launching import write_corpus
from processes import run_processes
from trouble_runs import SETTINGS, troubled

from ms_parallel import DistributedTrainer
from ms_parallel.cluster.layout import Layout
from ms_parallel.training.recovery import ROLL_BACKS, Policy

RUNS = Path(__file__).parent / "trouble_runs.py"
SPIKE, NOT_FINITE = 40.0, math.inf


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shards that one short run has built."""
    corpus = write_corpus(tmp_path_factory.mktemp("data") / "corpus")
    output = tmp_path_factory.mktemp("build") / "run"
    DistributedTrainer(**{**SETTINGS, "output_dir": output}).train(corpus, steps=1)
    return output / "shards"


def told(found: dict[str, Any]) -> list[tuple[int, str, str, int]]:
    """Each event `skipped`: step, reason, remedy, and the step after it."""
    names = ("step", "reason", "remedy", "step_after")
    return [tuple(event[name] for name in names) for event in found["skipped"]]  # type: ignore[misc]


def test_a_spike_is_skipped(shards: Path, tmp_path: Path) -> None:
    """Before it changes a weight; the update is counted, and the run goes on."""
    found = troubled(shards, tmp_path, {7: SPIKE}, on_spike="skip")
    assert told(found) == [(7, "refused", "skip", 7)]
    assert (found["taken"], found["counts"]) == (11, {"refused": 1})
    assert [step for step, _ in found["steps"]] == list(range(1, 13))


def test_a_roll_back_passes_over_the_batches_since_the_checkpoint(
    shards: Path, tmp_path: Path
) -> None:
    """Back at step 6 of a spike in batch 8, as if batches 7 and 8 were not there."""
    found = troubled(shards, tmp_path / "a", {8: SPIKE}, on_spike="roll_back")
    assert told(found) == [(8, "refused", "roll_back", 6)]
    assert [step for step, _ in found["steps"]] == [*range(1, 9), *range(7, 13)]
    assert (found["taken"], found["rolled_back"]) == (12, 1)
    other = DistributedTrainer(
        **{**SETTINGS, "output_dir": tmp_path / "b", "on_event": lambda *_: None}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ms_parallel.training.run.Run.take_steps", by_hand)
        other.train(shards, steps=12)
    run = other._run
    assert run is not None
    assert found["weights"] == {
        name: parameter.detach().double().norm().item()
        for name, parameter in run.engine.parameters.items()
    }


def by_hand(run: Any) -> bool:
    """Updates on batches 1 to 6 and 9 to 14, and nothing else."""
    from ms_parallel import NextTokenLoss

    for number in range(1, 15):
        batch = next(run.stream)
        if number not in (7, 8):
            run.engine.step(batch, NextTokenLoss(run.options.mtp_weight))
    return False


def test_a_run_that_dies_after_a_roll_back_comes_to_the_same(shards: Path, tmp_path: Path) -> None:
    """It goes back once more, from the same numbers, and passes over the same batches."""
    settings = {"on_spike": "roll_back", "on_nonfinite": "skip"}
    planted = {8: SPIKE, 11: NOT_FINITE}
    whole = troubled(shards, tmp_path / "a", planted, **settings)
    died = troubled(shards, tmp_path / "b", planted, **settings, fails_at=8)
    assert died["said"] == "OSError: a crash of this test"
    found = troubled(shards, tmp_path / "b", planted, **settings)
    assert found["weights"] == whole["weights"]
    assert (found["counts"], found["rolled_back"]) == (whole["counts"], whole["rolled_back"])
    assert whole["counts"] == {"refused": 1, "nonfinite": 1}


def test_without_a_checkpoint_a_roll_back_skips(shards: Path, tmp_path: Path) -> None:
    """There is nothing to go back to yet."""
    found = troubled(shards, tmp_path, {2: NOT_FINITE}, on_nonfinite="roll_back", steps=4)
    assert told(found) == [(2, "nonfinite", "skip", 2)]


def test_a_run_stops_if_asked_and_its_checkpoints_stay(shards: Path, tmp_path: Path) -> None:
    """Exit code 1, in one line; another remedy goes on from the checkpoint."""
    found = troubled(shards, tmp_path, {5: NOT_FINITE}, on_nonfinite="stop")
    assert found["said"].startswith("DivergenceError: step 5: gradient is not finite (loss inf")
    assert told(found) == [(5, "nonfinite", "stop", 5)]
    found = troubled(shards, tmp_path, {5: NOT_FINITE}, on_nonfinite="skip")
    assert [step for step, _ in found["steps"]] == list(range(4, 13))


def test_a_run_that_only_goes_back_is_ended(shards: Path, tmp_path: Path) -> None:
    """After so many times to one checkpoint."""
    planted = dict.fromkeys(range(5, 100), NOT_FINITE)
    found = troubled(shards, tmp_path, planted, on_nonfinite="roll_back")
    assert found["said"].startswith(f"DivergenceError: rolled back {ROLL_BACKS} times to one")
    assert found["rolled_back"] == ROLL_BACKS + 1


LAYOUTS = {
    1: ("data=1",),
    2: ("data=2", "tensor=2", "pipeline=2"),
    4: ("data=4", "tensor=4", "data=2,pipeline=2"),
}


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_course_is_the_same_under_every_layout(
    shards: Path, tmp_path: Path, count: int
) -> None:
    """Steps, reasons and remedies, on every process; losses as one process has them.

    Float32 sums in another order differ by about 1e-7, fed back through a dozen steps.
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

    (one,) = run_processes(1, RUNS, "all_troubled", jobs=jobs_of(LAYOUTS[1]))[0]
    assert told(one) == [(8, "refused", "roll_back", 6), (9, "nonfinite", "skip", 9)]
    of_ranks = run_processes(count, RUNS, "all_troubled", jobs=jobs_of(LAYOUTS[count]))
    for rank, of_rank in enumerate(of_ranks):
        for layout, found in zip(LAYOUTS[count], of_rank, strict=True):
            assert (found["counts"], found["taken"]) == (one["counts"], one["taken"]), layout
            if rank:
                continue
            assert told(found) == told(one), layout
            assert [s for s, _ in found["steps"]] == [s for s, _ in one["steps"]]
            losses = [[loss for _, loss in each["steps"]] for each in (found, one)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
            assert Layout.parse(layout).world_size == count


def test_a_roll_back_waits_for_the_checkpoint_that_is_being_written(
    shards: Path, tmp_path: Path
) -> None:
    """Beside the training as without: the spike comes one step behind the one that is saved."""
    settings = {"on_spike": "roll_back", "checkpoint_every": 6}
    waits, beside = (
        troubled(shards, tmp_path / str(flag), {7: SPIKE}, **settings, async_checkpoints=flag)
        for flag in (False, True)
    )
    assert told(beside) == told(waits) == [(7, "refused", "roll_back", 6)]
    assert beside["weights"] == waits["weights"]
    assert beside["steps"] == waits["steps"]


def test_where_bits_are_reproduced_so_is_the_course(shards: Path, tmp_path: Path) -> None:
    """Two data ranks skip and go back as one process does: losses and weights to the bit."""

    def course(count: int) -> dict[str, Any]:
        job = {
            "shards": str(shards),
            "output": str(tmp_path / str(count)),
            "planted": [(8, SPIKE), (11, NOT_FINITE)],
            "on_spike": "roll_back",
            "reproducible": True,
        }
        found: dict[str, Any] = run_processes(count, RUNS, "all_troubled", jobs=[job])[0][0]
        return found

    one, two = course(1), course(2)
    assert told(one) == [(8, "refused", "roll_back", 6), (9, "nonfinite", "skip", 9)]
    for what in ("steps", "skipped", "weights"):
        assert two[what] == one[what], what


def test_a_number_is_a_spike_by_how_far_numbers_lie_apart() -> None:
    """Once there are enough; where all are equal, by a hundredth of them."""
    policy = Policy(on_nonfinite="skip", on_spike="skip", factor=10.0, window=4)
    assert not policy.is_spike(1e9, [1.0, 1.0, 1.0])
    assert policy.is_spike(1.2, [1.0] * 4)
    assert not policy.is_spike(1.05, [1.0] * 4)
    assert not policy.is_spike(15.0, [1.0, 3.0, 2.0, 5.0])
    assert policy.rejects(1.0, 99.0, [(1.0, 1.0)] * 4)
