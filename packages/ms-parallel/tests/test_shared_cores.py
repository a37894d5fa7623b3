"""Pipelines that share cores idle as simulated with enough cores, and never with one core."""

import pytest

from ms_parallel.planner.layouts.pipeline import StageSeconds, makespan_s, stage_ranks
from ms_parallel.planner.layouts.shared_cores import shared_makespan_s
from ms_parallel.schedules.generators.registry import GENERATORS

RANKS = 4


def stages(name: str, message: float = 0.0) -> StageSeconds:
    """Different stages in whole milliseconds."""
    count = len(stage_ranks(name, RANKS))
    forward = tuple(0.002 + 0.001 * (stage % 3) for stage in range(count))
    twice = tuple(2 * seconds for seconds in forward)
    return StageSeconds(
        forward=forward, backward_input=twice, backward_weight=forward, message=message
    )


def all_work(name: str, microbatches: int) -> float:
    """Seconds of work of all ranks."""
    return microbatches * stages(name).work(range(len(stage_ranks(name, RANKS))))


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("microbatches", [8, 20])
def test_with_one_core_per_process_a_pipeline_idles_as_simulated(
    name: str, microbatches: int
) -> None:
    """Both models agree for every schedule and message time."""
    for message in (0.0, 0.0005):
        times = stages(name, message)
        simulated = makespan_s(name, RANKS, microbatches, times)
        for copies, cores in ((1, RANKS), (2, 2 * RANKS)):
            shared = shared_makespan_s(name, RANKS, microbatches, times, copies, cores)
            assert shared == pytest.approx(simulated, abs=1e-9)


@pytest.mark.parametrize("name", GENERATORS)
def test_one_core_never_idles(name: str) -> None:
    """If messages take no time, some rank is always ready."""
    shared = shared_makespan_s(name, RANKS, 8, stages(name), 2, 1)
    assert shared == pytest.approx(2 * all_work(name, 8))


@pytest.mark.parametrize("name", GENERATORS)
def test_fewer_cores_take_longer(name: str) -> None:
    """With two cores for four ranks it is more than half of all work, as one idles at both ends."""
    four_cores, two_cores, one_core = (
        shared_makespan_s(name, RANKS, 8, stages(name), 1, cores) for cores in (4, 2, 1)
    )
    assert four_cores <= two_cores <= one_core
    assert all_work(name, 8) / 2 < two_cores
    assert two_cores < all_work(name, 8) / 2 + 0.05


def test_one_microbatch_keeps_one_core_busy() -> None:
    """Each rank waits for the previous one, and the copies share the cores."""
    times = stages("gpipe")
    assert shared_makespan_s("gpipe", RANKS, 1, times, 2, 2) == pytest.approx(all_work("gpipe", 1))
