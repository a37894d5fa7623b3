"""Pipelines that share cores: with enough they wait as simulated, with one not at all."""

import pytest

from ms_parallel.planner.layouts.pipeline import StageSeconds, makespan_s, stage_ranks
from ms_parallel.planner.layouts.shared_cores import shared_makespan_s
from ms_parallel.schedules.generators.registry import GENERATORS

RANKS = 4


def stages(name: str, message: float = 0.0) -> StageSeconds:
    """Stages that differ, by whole milliseconds."""
    count = len(stage_ranks(name, RANKS))
    forward = tuple(0.002 + 0.001 * (stage % 3) for stage in range(count))
    twice = tuple(2 * each for each in forward)
    return StageSeconds(
        forward=forward, backward_input=twice, backward_weight=forward, message=message
    )


def all_work(name: str, microbatches: int) -> float:
    """Seconds of all ranks."""
    return microbatches * stages(name).work(range(len(stage_ranks(name, RANKS))))


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("microbatches", [8, 20])
def test_with_a_core_for_each_process_a_pipeline_waits_as_simulated(
    name: str, microbatches: int
) -> None:
    """Both say the same of every schedule, whatever messages take."""
    for message in (0.0, 0.0005):
        times = stages(name, message)
        alone = makespan_s(name, RANKS, microbatches, times)
        for copies, cores in ((1, RANKS), (2, 2 * RANKS)):
            shared = shared_makespan_s(name, RANKS, microbatches, times, copies, cores)
            assert shared == pytest.approx(alone, abs=1e-9)


@pytest.mark.parametrize("name", GENERATORS)
def test_one_core_does_all_work_and_never_waits(name: str) -> None:
    """Some rank always has something to do where messages take no time."""
    shared = shared_makespan_s(name, RANKS, 8, stages(name), 2, 1)
    assert shared == pytest.approx(2 * all_work(name, 8))


@pytest.mark.parametrize("name", GENERATORS)
def test_fewer_cores_take_longer_and_no_less_than_their_share(name: str) -> None:
    """Two cores of four ranks: more than half of all work, as one of them waits at both ends."""
    four, two, one = (
        shared_makespan_s(name, RANKS, 8, stages(name), 1, cores) for cores in (4, 2, 1)
    )
    assert four <= two <= one
    assert all_work(name, 8) / 2 < two
    assert two < all_work(name, 8) / 2 + 0.05


def test_a_chain_of_one_microbatch_has_one_core_busy() -> None:
    """Each rank waits for the one before it, and its copies have the cores."""
    times = stages("gpipe")
    assert shared_makespan_s("gpipe", RANKS, 1, times, 2, 2) == pytest.approx(all_work("gpipe", 1))
