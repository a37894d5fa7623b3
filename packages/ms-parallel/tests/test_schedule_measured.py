"""Schedules searched for measured costs, and recorded steps."""

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
from ms_parallel.planner.searched_schedule import read_searched_schedule
from ms_parallel.planner.shortest import shortest_schedule
from ms_parallel.schedules import Schedule, SegmentCosts, simulate, verify

MEASURING = Path(__file__).parent / "measuring.py"
# As in test_layouts.
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    "layout", ["pipeline=2", pytest.param("data=2,pipeline=2", marks=pytest.mark.slow)]
)
def test_a_searched_schedule_is_equal_on_all_ranks_and_trains_like_one_process(layout: str) -> None:
    """All ranks agree on a valid schedule, and measuring does not change random state."""
    count = 4 if "data" in layout else 2
    of_ranks = run_processes(count, MEASURING, "search_and_train", layout=layout, steps=3)
    (expected,) = run_processes(1, MEASURING, "one_process", rows=4 * count // 2, steps=3)
    assert len({result["digest"] for result in of_ranks}) == 1
    for result in of_ranks:
        assert result["rng_unchanged"]
        assert result["losses"] == pytest.approx(expected, rel=TOLERANCE)
    schedule = Schedule.from_csv(of_ranks[0]["table"])
    verify(schedule)
    assert (schedule.ranks, schedule.microbatches) == (2, 4)
    assert len(of_ranks[0]["layers"]) == schedule.stages
    assert sum(of_ranks[0]["layers"]) == 6
    assert len({str(result["generated"]) for result in of_ranks}) == 1
    assert all(min(result["costs"]["forward_ms"]) > 0 for result in of_ranks)


def test_saved_bytes_of_layers_are_measured() -> None:
    """Bytes by hand: inputs of a block's linear layers, and gradients of their outputs."""
    (plain,) = run_processes(1, MEASURING, "layer_facts", recompute="none")
    hidden, inner, tokens, word = 64, 256, 2 * 64, 4
    # Linear layers save their inputs: three of width hidden (for q, k and v; for the output
    # projection; for gate and up) and an input of width inner. Norms, rotary and gate save more.
    minimum = tokens * word * (3 * hidden + inner)
    assert all(minimum <= size <= 5 * minimum for size in plain["activation"][:-1])
    assert plain["activation"][-1] > plain["activation"][-2], "the head saves more"
    # Until the weight backward: inputs of linear layers and gradients of their outputs.
    retained = tokens * word * (3 * hidden + inner + 4.5 * hidden + 2 * inner)
    assert all(0.8 * retained <= size <= 1.2 * retained for size in plain["retained"][1:-1])
    assert min(plain["forward"] + plain["backward_input"] + plain["backward_weight"]) > 0


def test_a_search_gives_fewer_layers_to_a_stage_with_a_heavy_head() -> None:
    """A heavy head gets fewer layers, and the result is no slower than 1F1B with equal memory."""
    costs = SegmentCosts(
        forward=[10, 10, 10, 10, 10, 10, 10, 40],
        backward_input=[13] * 7 + [50],
        backward_weight=[7] * 7 + [30],
        activation=[100] * 8,
        latency=1,
        transfer=2,
    )
    shortest = shortest_schedule(costs, 2, 8, None, conditions={"rows": 8}, effort=0.1)
    assert shortest.makespan_ms < shortest.one_f_one_b_ms
    assert max(shortest.peak_bytes) <= shortest.memory_cap_bytes == 800
    assert shortest.lower_bound_ms <= shortest.makespan_ms
    line = simulate(shortest.staged.schedule, costs.stages(shortest.layers))
    assert float(line.makespan) / 1000 == pytest.approx(shortest.makespan_ms)
    with pytest.raises(ScheduleError, match="needs at least"):
        shortest_schedule(costs, 2, 8, 150, conditions={}, effort=0.1)


def test_segments_of_several_layers_count_all_layers() -> None:
    """If only every second layer is a cut, stages get full segments and layers add up."""
    times = [10, 10, 10, 10]
    costs = SegmentCosts(
        forward=times, backward_input=times, backward_weight=times, layers=[2, 2, 2, 1]
    )
    shortest = shortest_schedule(costs, 2, 4, None, conditions={}, effort=0.05)
    assert sum(shortest.layers) == 7
    assert shortest.staged.layers in ((4, 3), (2, 2, 2, 1))


def test_a_stopped_run_resumes_with_its_schedule_bit_identically(tmp_path: Path) -> None:
    """The schedule is read from its file, although costs would be measured differently now."""
    corpus = write_corpus(tmp_path / "corpus")
    for result in run_processes(
        2, MEASURING, "stop_and_resume", corpus=str(corpus), folder=str(tmp_path)
    ):
        assert result["same schedule"]
        assert result["same bits"]
        assert result["recordings"] == [f"step-{step:08}.json" for step in (2, 4, 6)]
    path = tmp_path / "uninterrupted" / "schedule.json"
    assert read_searched_schedule(path) is not None
    path.write_bytes(path.read_bytes().replace(b"0F0", b"0F9", 1))
    with pytest.raises(ConfigError, match="delete it to search again"):
        read_searched_schedule(path)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A recorded step of ZB-V on two processes."""
    path = tmp_path_factory.mktemp("recorded") / "step.json"
    return path, run_processes(
        2, MEASURING, "record_update", schedule="zb-v", path=str(path), shift_ns=5_000_000_000
    )


def test_recording_does_not_change_a_step(recording: tuple[Path, list[dict[str, Any]]]) -> None:
    """Its loss is bit-identical, ranks share all times, and causes precede effects."""
    path, of_ranks = recording
    assert all(result["same loss"] for result in of_ranks)
    assert of_ranks[0]["times"] == of_ranks[1]["times"]
    line = read_step(path).timeline()
    assert [len(row) for row in line.spans] == [12, 12]
    for row in line.spans:
        assert all(before.end <= after.start for before, after in pairwise(row))
        for span in row:
            if span.cause is not None:
                rank, index = span.cause
                assert line.spans[rank][index].end <= span.start


def test_the_clock_offset_of_another_machine_is_measured(
    recording: tuple[Path, list[dict[str, Any]]],
) -> None:
    """Five seconds late, measured to within a round trip."""
    first, second = (result["offset"] for result in recording[1])
    assert first == 0
    assert abs(second - 5_000_000_000) < 20_000_000, "a round trip on a busy machine"


def test_a_recorded_step_is_drawn_with_the_simulated_one(
    recording: tuple[Path, list[dict[str, Any]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From the file alone, with its mean costs, or next to another schedule's simulation."""
    path, out = recording[0], tmp_path / "both.svg"
    assert main(["schedule", str(path), "--out", str(out)]) == 0
    output = capsys.readouterr().out
    assert "simulated: ZB-V, 2 ranks, 4 stages, 2 microbatches" in output
    assert "measured: ZB-V" in output
    assert "simulated: ZB-V" in out.read_text()
    assert "measured: ZB-V" in out.read_text()
    sizes = ["--stages", "2", "--microbatches", "2"]
    assert main(["schedule", "v-half", *sizes, "--measured", str(path), "--json"]) == 0
    facts = capsys.readouterr().out
    assert '"measured_makespan"' in facts
    for name in ("1f1b", "v-half"):  # with a different and with the same number of stages
        assert main(["schedule", name, *sizes, "--measured", str(path), "--json"]) == 0
        facts_json = json.loads(capsys.readouterr().out)
        times = [time for row in json.loads(path.read_text())["times_ns"] for time in row]
        took_ns = max(end for _, end in times) - min(start for start, _ in times)
        assert facts_json["measured_makespan"] == pytest.approx(took_ns / 1e6)
        # Both in milliseconds: the same work on the same ranks in a different order.
        assert 0.2 < facts_json["makespan"] / facts_json["measured_makespan"] < 5
    assert main(["schedule", "1f1b", *sizes, "--measured", str(tmp_path / "none.json")]) == 2
    (tmp_path / "bad.json").write_text('{"type": "timeline.v1", "step": -1}')
    assert main(["schedule", str(tmp_path / "bad.json")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "none.json: cannot be read" in lines[0]
    assert "bad.json: not a recorded step" in lines[1]
