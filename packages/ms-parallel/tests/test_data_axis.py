"""All shardings over the data axis train like one process."""

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
from ms_parallel.memory.modes import SHARDINGS
from ms_parallel.training.memory import run_memory
from ms_parallel.training.options import Options

RUNS = Path(__file__).parent / "sharding_runs.py"
EXPERTS = {**FAMILIES["qwen3_moe"], "num_experts": 8}
PLAIN: dict[str, Any] = VARIANTS["tied grouped"]


def sharding_options(name: str, **options: Any) -> dict[str, Any]:
    """Engine options of a sharding, with two microbatches per data rank of two."""
    return {"sharding": name, "microbatch_size": 1, **options}


def test_gradients_of_all_shardings_equal_one_process(tmp_path: Path) -> None:
    """Several microbatches, recomputation, experts and context."""
    check(
        [
            *(job("data=2", PLAIN, options=sharding_options(name)) for name in SHARDINGS),
            job("data=2", EXPERTS, options=sharding_options("zero3", recompute="full")),
            job("data=2,expert=2", EXPERTS, options=sharding_options("zero2")),
            job("context=2,replicate=2", PLAIN, options={"microbatch_size": 2}),
        ],
        tmp_path,
    )


def test_gradients_of_replicated_shards_equal_one_process(tmp_path: Path) -> None:
    """Two replicas of two shards, with experts, and all shardings in a pipeline."""
    check(
        [
            job("data=4,replicate=2", PLAIN, options=sharding_options("zero3")),
            job("data=4,replicate=2,expert=2", EXPERTS, options=sharding_options("zero2")),
            job("data=2,pipeline=2", PLAIN, options=sharding_options("zero2", schedule="zb-h1")),
            job("data=2,pipeline=2", PLAIN, options=sharding_options("replicate")),
            # Four microbatches whose losses are computed after all forwards.
            job("pipeline=2,context=2", PLAIN, options=sharding_options("zero3", schedule="gpipe")),
            job("data=2,tensor=2", PLAIN, options=sharding_options("zero3", recompute="full")),
        ],
        tmp_path,
    )


@pytest.mark.slow
def test_gradients_under_random_layouts_equal_one_process(tmp_path: Path) -> None:
    """Replicas, shards, experts, context, tensor, and pipeline schedules."""
    rng = random.Random(2)
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
    for index in range(45):
        layout = layouts[index % len(layouts)]
        pipeline = "pipeline" in layout
        options = {
            "sharding": rng.choice(("auto", "zero1", "zero2", "zero3")),
            "recompute": rng.choice(("none", "full")),
            "microbatch_size": 1 if pipeline else rng.choice((1, 2)),
        }
        if pipeline:
            options["schedule"] = rng.choice(("1f1b", "zb-h1", "gpipe"))
        length = 4 * rng.choice((3, 4))
        model = EXPERTS if "expert" in layout else rng.choice((PLAIN, EXPERTS))
        jobs.append(job(layout, model, options=options, length=length, seed=index % 3))
    check(jobs, tmp_path)


def train_jobs(count: int, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of each job, checked to be equal on all processes."""
    ranks = run_processes(count, RUNS, "train_jobs", jobs=jobs)
    assert all(results == ranks[0] for results in ranks)
    results: list[dict[str, Any]] = ranks[0]
    return results


def test_all_shardings_give_the_same_weights() -> None:
    """To the bit, unless sums are taken per microbatch or per process.

    Two processes add two numbers, so the order of their sum does not matter.
    """
    cases = [{"layout": "data=2", "options": {"sharding": name}} for name in SHARDINGS]
    cases += [{"layout": "data=2", "options": sharding_options(name)} for name in SHARDINGS]
    single = train_jobs(1, [{"layout": "data=1", "options": {}}])[0]
    results = train_jobs(2, cases)
    for result in results:
        for key in ("losses", "norms"):
            assert result[key] == pytest.approx(single[key], rel=1e-5)
    one_microbatch, two_microbatches = results[: len(SHARDINGS)], results[len(SHARDINGS) :]
    assert len({result["state"] for result in one_microbatch}) == 1
    by_name = {name: r["state"] for name, r in zip(SHARDINGS, two_microbatches, strict=True)}
    assert by_name["zero2"] == by_name["zero3"]
    assert by_name["auto"] == by_name["zero1"] == by_name["replicate"]


@pytest.mark.slow
def test_memory_between_microbatches_is_as_predicted() -> None:
    """A shard of everything, plus full weights or gradients where a sharding keeps them."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_key_value_heads": 4}
    jobs = [
        {"layout": "data=2", "settings": sizes, "options": sharding_options(name)}
        for name in SHARDINGS
    ]
    counted, _ = run_processes(2, RUNS, "allocated_bytes", jobs=jobs)
    common = {"sequence_length": 16, "batch_size": 4, "microbatch_size": 1, "device": "cpu"}
    model = {"vocab_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8}
    for name, result in zip(SHARDINGS, counted, strict=True):
        options = Options("llama", model_config={**model, **sizes}, sharding=name, **common)
        (rank,) = run_memory(options, Layout(data=2))
        before = rank.weights + rank.moments
        assert result["before"] == pytest.approx(before, rel=0.05), name
        # Between microbatches, weights stay gathered except with replicate or zero3; the other half
        # of the gradients stays if they are reduced once per update.
        weights = 0 if name in ("replicate", "zero3") else 2 * rank.weights
        gradients = rank.gradients if name in ("auto", "zero1") else 0
        gathered = weights + gradients
        between = before + rank.gradients + gathered
        assert result["between"] == pytest.approx(between, rel=0.05), name


def test_checkpoints_load_under_other_shardings(tmp_path: Path) -> None:
    """Weights and moments to the bit, and the next update too."""
    jobs = [
        {
            "layout": "data=2",
            "options": sharding_options("zero3"),
            "other": {"options": sharding_options("replicate")},
        },
        {
            "layout": "data=2",
            "options": sharding_options("replicate"),
            "other": {"options": sharding_options("zero2")},
        },
        {
            "layout": "data=2",
            "options": sharding_options("zero1"),
            "other": {"layout": "pipeline=2"},
        },
    ]
    ranks = run_processes(2, RUNS, "resume_jobs", jobs=jobs, folder=str(tmp_path))
    for results in ranks:
        for saved, loaded, *losses in results[:2]:
            assert saved == loaded
            assert len(set(losses)) == 1


def test_offloaded_moments_are_bit_identical(tmp_path: Path) -> None:
    """On an emulated accelerator, also through a checkpoint."""
    plain = {"layout": "data=2", "settings": PLAIN, "options": {}}
    offloaded = {**plain, "options": {"offload": "moments"}}
    for results in run_on_rig(2, RUNS, "train_jobs", jobs=[plain, offloaded], device=None):
        on_device, on_host = results
        assert (on_device["moments"], on_host["moments"]) == (["rig"], ["cpu"])
        assert {**on_device, "moments": 0} == {**on_host, "moments": 0}
    pairs = [{**plain, "other": offloaded}, {**offloaded, "other": plain}]
    for results in run_on_rig(
        2, RUNS, "resume_jobs", jobs=pairs, folder=str(tmp_path), device=None
    ):
        for saved, loaded, *losses in results:
            assert saved == loaded
            assert len(set(losses)) == 1


@pytest.mark.parametrize(
    ("layout", "options", "reason"),
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
def test_invalid_shardings_are_refused_with_the_reason(
    layout: dict[str, int], options: dict[str, Any], reason: str
) -> None:
    """Before the processes are needed."""
    with pytest.raises((LayoutError, ConfigError), match=reason) as caught:
        Engine("qwen3_moe", Layout(**layout), **options)
    assert "\n" not in str(caught.value)
