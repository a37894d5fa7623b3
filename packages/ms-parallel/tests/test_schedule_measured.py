"""Schedules that are searched for measured costs, and steps that are recorded as they run."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from launching import write_corpus
from processes import run_processes

from ms_parallel.cli import main
from ms_parallel.errors import ConfigError, ScheduleError
from ms_parallel.pipeline.step_file import read_step
from ms_parallel.planner.found_schedule import read_searched_schedule
from ms_parallel.planner.shortest import shortest_schedule
from ms_parallel.schedules import Schedule, SegmentCosts, simulate, verify

MEASURING = Path(__file__).parent / "measuring.py"
# As in test_layouts.
TOLERANCE = 1e-5


@pytest.mark.parametrize("layout", ["pipeline=2", "data=2,pipeline=2"])
def test_a_searched_schedule_is_one_on_all_ranks_and_trains_as_one_process(layout: str) -> None:
    """Measured, agreed on, proved; and what measures leaves the run's chance alone."""
    count = 4 if "data" in layout else 2
    of_ranks = run_processes(count, MEASURING, "searched", layout=layout, steps=3)
    (one,) = run_processes(1, MEASURING, "one_process", rows=4 * count // 2, steps=3)
    assert len({found["digest"] for found in of_ranks}) == 1
    for found in of_ranks:
        assert found["untouched"]
        assert found["losses"] == pytest.approx(one, rel=TOLERANCE)
    schedule = Schedule.from_csv(of_ranks[0]["table"])
    verify(schedule)
    assert (schedule.ranks, schedule.microbatches) == (2, 4)
    assert len(of_ranks[0]["layers"]) == schedule.stages
    assert sum(of_ranks[0]["layers"]) == 6
    assert len({str(found["generated"]) for found in of_ranks}) == 1
    assert all(min(found["costs"]["forward_ms"]) > 0 for found in of_ranks)


def test_what_a_layer_keeps_is_weighed() -> None:
    """Bytes by hand: the inputs that the maps of one block keep, and their outputs' gradients."""
    (plain,) = run_processes(1, MEASURING, "layer_facts", recompute="none")
    hidden, inner, tokens, word = 64, 256, 2 * 64, 4
    # Maps keep their inputs (hidden thrice: of queries, keys and values together, of the
    # attention's output, of the gate and up together; inner once). What else is kept (norms,
    # rotations, the gate) is at most as much again and a half.
    least = tokens * word * (3 * hidden + inner)
    assert all(least <= kept <= 5 * least for kept in plain["activation"][:-1])
    assert plain["activation"][-1] > plain["activation"][-2], "the head keeps more"
    # To the backward of weights: inputs of the maps and gradients of their outputs.
    maps = tokens * word * (3 * hidden + inner + 4.5 * hidden + 2 * inner)
    assert all(0.8 * maps <= kept <= 1.2 * maps for kept in plain["retained"][1:-1])
    assert min(plain["forward"] + plain["backward_input"] + plain["backward_weight"]) > 0


def test_the_search_weighs_layers_and_head_alike_on_all_placements() -> None:
    """A heavy head is given fewer layers; the result is no slower than 1F1B in as much memory."""
    costs = SegmentCosts(
        forward=[10, 10, 10, 10, 10, 10, 10, 40],
        backward_input=[13] * 7 + [50],
        backward_weight=[7] * 7 + [30],
        activation=[100] * 8,
        latency=1,
        transfer=2,
    )
    found = shortest_schedule(costs, 2, 8, None, conditions={"rows": 8}, effort=0.1)
    assert found.makespan_ms < found.one_f_one_b_ms
    assert max(found.peak_bytes) <= found.memory_cap_bytes == 800
    assert found.lower_bound_ms <= found.makespan_ms
    line = simulate(found.staged.schedule, costs.stages(found.layers))
    assert float(line.makespan) / 1000 == pytest.approx(found.makespan_ms)
    with pytest.raises(ScheduleError, match="needs at least"):
        shortest_schedule(costs, 2, 8, 150, conditions={}, effort=0.1)


def test_a_segment_of_several_layers_counts_each_of_them() -> None:
    """A model that can be cut at every second layer: stages get whole segments, layers add up."""
    times = [10, 10, 10, 10]
    costs = SegmentCosts(
        forward=times, backward_input=times, backward_weight=times, layers=[2, 2, 2, 1]
    )
    found = shortest_schedule(costs, 2, 4, None, conditions={}, effort=0.05)
    assert sum(found.layers) == 7
    assert found.staged.layers in ((4, 3), (2, 2, 2, 1))


def test_a_stopped_run_goes_on_under_its_schedule_bit_for_bit(tmp_path: Path) -> None:
    """The file keeps the schedule, though costs would be measured otherwise now."""
    corpus = write_corpus(tmp_path / "corpus")
    for found in run_processes(
        2, MEASURING, "stopped_and_resumed", corpus=str(corpus), folder=str(tmp_path)
    ):
        assert found["kept"]
        assert found["same bits"]
        assert found["recordings"] == [f"step-{step:08}.json" for step in (2, 4, 6)]
    path = tmp_path / "whole" / "schedule.json"
    assert read_searched_schedule(path) is not None
    path.write_bytes(path.read_bytes().replace(b"0F0", b"0F9", 1))
    with pytest.raises(ConfigError, match="delete it to search again"):
        read_searched_schedule(path)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A recorded step of ZB-V over two processes."""
    path = tmp_path_factory.mktemp("recorded") / "step.json"
    return path, run_processes(
        2, MEASURING, "recorded", schedule="zb-v", path=str(path), shift_ns=5_000_000_000
    )


def test_a_recorded_step_is_the_same_step(recording: tuple[Path, list[dict[str, Any]]]) -> None:
    """Its loss has the same bits; all ranks know all times, and causes come before effects."""
    path, of_ranks = recording
    assert all(found["same"] for found in of_ranks)
    assert of_ranks[0]["times"] == of_ranks[1]["times"]
    line = read_step(path).timeline()
    assert [len(row) for row in line.spans] == [12, 12]
    for row in line.spans:
        assert all(one.end <= two.start for one, two in pairwise(row))
        for span in row:
            if span.cause is not None:
                rank, index = span.cause
                assert line.spans[rank][index].end <= span.start


def test_a_clock_of_another_machine_is_read_right(
    recording: tuple[Path, list[dict[str, Any]]],
) -> None:
    """Five seconds late, to the time of a round trip."""
    first, second = (found["offset"] for found in recording[1])
    assert first == 0
    assert abs(second - 5_000_000_000) < 20_000_000, "a round trip on a busy machine"


def test_a_recorded_step_is_drawn_beside_the_simulated_one(
    recording: tuple[Path, list[dict[str, Any]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the file alone, with its own mean costs; or beside another schedule's simulation."""
    path, out = recording[0], tmp_path / "both.svg"
    assert main(["schedule", str(path), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "simulated: ZB-V, 2 ranks, 4 stages, 2 microbatches" in said
    assert "measured: ZB-V" in said
    assert "simulated: ZB-V" in out.read_text()
    assert "measured: ZB-V" in out.read_text()
    sizes = ["--stages", "2", "--microbatches", "2"]
    assert main(["schedule", "v-half", *sizes, "--measured", str(path), "--json"]) == 0
    facts = capsys.readouterr().out
    assert '"measured_makespan"' in facts
    for name in ("1f1b", "v-half"):  # of another number of stages, and of the same
        assert main(["schedule", name, *sizes, "--measured", str(path), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        times = [time for row in json.loads(path.read_text())["times_ns"] for time in row]
        took_ns = max(end for _, end in times) - min(begin for begin, _ in times)
        assert told["measured_makespan"] == pytest.approx(took_ns / 1e6)
        # Both in milliseconds: the same work by the same ranks, in another order.
        assert 0.2 < told["makespan"] / told["measured_makespan"] < 5
    assert main(["schedule", "1f1b", *sizes, "--measured", str(tmp_path / "none.json")]) == 2
    (tmp_path / "bad.json").write_text('{"type": "timeline.v1", "step": -1}')
    assert main(["schedule", str(tmp_path / "bad.json")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "none.json: cannot be read" in lines[0]
    assert "bad.json: not a recorded step" in lines[1]
