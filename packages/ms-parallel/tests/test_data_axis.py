"""However a model is shared out over the data axis, it trains as in one process."""

import random
from pathlib import Path
from typing import Any

import pytest
from ms_rig import run_on_rig
from oracle import check, job
from processes import run_processes
from runs import FAMILIES, VARIANTS

from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.errors import ConfigError, LayoutError
from ms_parallel.split.data_axis import SHARDINGS
from ms_parallel.training.memory import run_memory
from ms_parallel.training.options import Options

RUNS = Path(__file__).parent / "sharding_runs.py"
EXPERTS = {**FAMILIES["qwen3_moe"], "num_experts": 8}
PLAIN: dict[str, Any] = VARIANTS["tied grouped"]


def shared(name: str, **options: Any) -> dict[str, Any]:
    """Options of an engine, with two microbatches a data rank of two."""
    return {"sharding": name, "microbatch_size": 1, **options}


def test_gradients_are_those_of_one_process_however_weights_are_shared_out(tmp_path: Path) -> None:
    """Several microbatches, recomputation, a pipeline that puts weights' gradients off."""
    check(
        [
            *(job("data=2", PLAIN, options=shared(name)) for name in SHARDINGS),
            job("data=2", EXPERTS, options=shared("zero3", recompute="full")),
            job("data=2,expert=2", EXPERTS, options=shared("zero2")),
            job("context=2,replicate=2", PLAIN, options={"microbatch_size": 2}),
        ],
        tmp_path,
    )


def test_gradients_are_those_of_one_process_where_shards_have_copies(tmp_path: Path) -> None:
    """Two copies of two shards, with experts, and each way under a pipeline."""
    check(
        [
            job("data=4,replicate=2", PLAIN, options=shared("zero3")),
            job("data=4,replicate=2,expert=2", EXPERTS, options=shared("zero2")),
            job("data=2,pipeline=2", PLAIN, options=shared("zero2", schedule="zb-h1")),
            job("data=2,pipeline=2", PLAIN, options=shared("replicate")),
            # Four microbatches whose losses wait for the head.
            job("pipeline=2,context=2", PLAIN, options=shared("zero3", schedule="gpipe")),
            job("data=2,tensor=2", PLAIN, options=shared("zero3", recompute="full")),
        ],
        tmp_path,
    )


@pytest.mark.slow
def test_gradients_are_those_of_one_process_under_drawn_layouts(tmp_path: Path) -> None:
    """Copies, shards, experts, context, tensor, pipeline and its schedules."""
    chance = random.Random(2)
    layouts = (
        "data=4,replicate=2",
        "data=4,replicate=4",
        "data=2,context=2,replicate=2",
        "data=2,tensor=2,replicate=2",
        "data=2,pipeline=2,replicate=2",
        "data=4,tensor=2,replicate=2,expert=2",
        "data=4,pipeline=2,replicate=2,expert=2",
        "data=2,context=4,replicate=2,expert=4",
        "data=2,pipeline=2,expert=2",
    )
    jobs = []
    for number in range(45):
        layout = layouts[number % len(layouts)]
        pipeline = "pipeline" in layout
        options = {
            "sharding": chance.choice(("auto", "zero1", "zero2", "zero3")),
            "recompute": chance.choice(("none", "full")),
            "microbatch_size": 1 if pipeline else chance.choice((1, 2)),
        }
        if pipeline:
            options["schedule"] = chance.choice(("1f1b", "zb-h1", "gpipe"))
        length = 4 * chance.choice((3, 4))
        model = EXPERTS if "expert" in layout else chance.choice((PLAIN, EXPERTS))
        jobs.append(job(layout, model, options=options, length=length, seed=number % 3))
    check(jobs, tmp_path)


def trained(count: int, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each job comes to, the same on every process."""
    of_ranks = run_processes(count, RUNS, "trained", jobs=jobs)
    assert all(found == of_ranks[0] for found in of_ranks)
    found: list[dict[str, Any]] = of_ranks[0]
    return found


def test_the_ways_of_sharing_out_come_to_the_same_weights() -> None:
    """To the bit, but for sums that are taken microbatch by microbatch or process by process.

    Two processes add two numbers, whichever way these travel.
    """
    cases = [{"layout": "data=2", "options": {"sharding": name}} for name in SHARDINGS]
    cases += [{"layout": "data=2", "options": shared(name)} for name in SHARDINGS]
    alone = trained(1, [{"layout": "data=1", "options": {}}])[0]
    found = trained(2, cases)
    for each in found:
        for what in ("losses", "norms"):
            assert each[what] == pytest.approx(alone[what], rel=1e-5)
    whole, parts = found[: len(SHARDINGS)], found[len(SHARDINGS) :]
    assert len({each["state"] for each in whole}) == 1
    by_name = {name: each["state"] for name, each in zip(SHARDINGS, parts, strict=True)}
    assert by_name["zero2"] == by_name["zero3"]
    assert by_name["auto"] == by_name["zero1"] == by_name["replicate"]


def test_what_lies_in_memory_between_microbatches_is_what_each_way_keeps() -> None:
    """As predicted: a share of all, and weights or gradients that stay whole, or neither."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_key_value_heads": 4}
    jobs = [{"layout": "data=2", "settings": sizes, "options": shared(name)} for name in SHARDINGS]
    counted, _ = run_processes(2, RUNS, "allocated_bytes", jobs=jobs)
    common = {"sequence_length": 16, "batch_size": 4, "microbatch_size": 1, "device": "cpu"}
    model = {"vocab_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8}
    for name, found in zip(SHARDINGS, counted, strict=True):
        options = Options("llama", model_config={**model, **sizes}, sharding=name, **common)
        (rank,) = run_memory(options, Layout(data=2))
        before = rank.weights + rank.moments
        assert found["before"] == pytest.approx(before, rel=0.05), name
        # Between microbatches, weights stay gathered unless copied or zero3; the other half of the
        # gradients stays too where they are summed once per update.
        weights = 0 if name in ("replicate", "zero3") else 2 * rank.weights
        gradients = rank.gradients if name in ("auto", "zero1") else 0
        gathered = weights + gradients
        between = before + rank.gradients + gathered
        assert found["between"] == pytest.approx(between, rel=0.05), name


def test_what_one_way_saves_another_reads(tmp_path: Path) -> None:
    """Weights and moments to the bit; the next update too."""
    jobs = [
        {"layout": "data=2", "options": shared("zero3"), "other": {"options": shared("replicate")}},
        {"layout": "data=2", "options": shared("replicate"), "other": {"options": shared("zero2")}},
        {"layout": "data=2", "options": shared("zero1"), "other": {"layout": "pipeline=2"}},
    ]
    ranks = run_processes(2, RUNS, "resumed", jobs=jobs, folder=str(tmp_path))
    for found in ranks:
        for saved, read, *losses in found[:2]:
            assert saved == read
            assert len(set(losses)) == 1


def test_moments_that_lie_in_the_machines_memory_are_the_same_to_the_bit(tmp_path: Path) -> None:
    """On a device of its own, of which they have none; also through a checkpoint."""
    plain = {"layout": "data=2", "settings": PLAIN, "options": {}}
    away = {**plain, "options": {"offload": "moments"}}
    for found in run_on_rig(2, RUNS, "trained", jobs=[plain, away], device=None):
        here, there = found
        assert (here["moments"], there["moments"]) == (["rig"], ["cpu"])
        assert {**here, "moments": 0} == {**there, "moments": 0}
    pairs = [{**plain, "other": away}, {**away, "other": plain}]
    for found in run_on_rig(2, RUNS, "resumed", jobs=pairs, folder=str(tmp_path), device=None):
        for saved, read, *losses in found:
            assert saved == read
            assert len(set(losses)) == 1


@pytest.mark.parametrize(
    ("layout", "options", "why"),
    [
        ({"data": 4, "replicate": 2}, {"sharding": "replicate"}, "remove replicate, or set"),
        ({"data": 2, "expert": 2}, {"sharding": "replicate"}, "set sharding='zero1'"),
        ({"data": 2}, {"sharding": "zero4"}, "sharding is 'zero4'"),
        (
            {"data": 2},
            {"offload": "moments", "optimizer": "Muon"},
            "requires the optimizer AdamW, got Muon",
        ),
        ({"data": 4, "replicate": 3}, {}, "replicate=3 does not divide the 4 ranks"),
        ({"data": 4, "replicate": 2, "expert": 4}, {}, "expert=4 does not divide the 2 ranks"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_with_the_reason(
    layout: dict[str, int], options: dict[str, Any], why: str
) -> None:
    """Before a process is asked for."""
    with pytest.raises((LayoutError, ConfigError), match=why) as caught:
        Engine("qwen3_moe", Layout(**layout), **options)
    assert "\n" not in str(caught.value)
