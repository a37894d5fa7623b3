"""Automatic microbatch sizes are the largest that fit, and never run out of memory."""

import platform
import random
from pathlib import Path
from typing import Any

import pytest
from processes import run_processes

from ms_parallel.cluster.layout import Layout
from ms_parallel.planner.free_memory import RESERVE_BYTES
from ms_parallel.planner.largest_microbatch import next_trial, sizes_of

RUNS = Path(__file__).with_name("room_runs.py")
CASES = 50
OUT_OF_MEMORY = "can't allocate memory"
"""Part of torch's message when a limit denies it memory."""
OVERHEAD_MIB = {1: 40, 2: 120}
"""MiB for threads by the number of processes, in addition to tensors."""


def random_run(seed: int) -> dict[str, Any]:
    """A random run, and a share of memory above the need of its smallest microbatch."""
    rng = random.Random(seed)
    hidden = rng.choice((96, 128, 192))
    layers = rng.choice((2, 4))
    model = {
        "hidden_size": hidden,
        "intermediate_size": rng.choice((2, 3, 4)) * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": rng.choice((2, 4)),
        "num_hidden_layers": layers,
        "vocab_size": rng.choice((512, 2048, 8192)),
    }
    layout = rng.choice(("data=1", "data=2", "tensor=2", "pipeline=2"))
    settings = {
        "model_config": model,
        "batch_size": rng.choice((12, 16, 24)),
        "sequence_length": 512,
        "recompute": rng.choice(("none", "none", "selective", "full")),
        "optimizer": rng.choice(("AdamW", "AdamW", "SGD", "Muon")),
    }
    if layout == "data=2":
        settings["sharding"] = rng.choice(("auto", "zero1", "zero3"))
    return {"layout": layout, "settings": settings, "share": rng.random()}


def random_plan(seed: int) -> dict[str, Any]:
    """A random run to plan, with random links and a share of memory."""
    rng = random.Random(1000 + seed)
    hidden, recompute = (
        rng.choice((64, 96)),
        rng.choice(("none", "none", "full", "selective")),
    )
    model = {
        "hidden_size": hidden,
        "intermediate_size": rng.choice((2, 3, 4)) * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": rng.choice((2, 4)),
        "num_hidden_layers": rng.choice((4, 8)),
        # If blocks save little, a large vocabulary makes up for it.
        "vocab_size": rng.choice((256, 2048) if recompute == "none" else (2048, 4096)),
    }
    settings = {
        "model_config": model,
        "batch_size": rng.choice((6, 8, 9, 10)),  # 9 rows do not divide over 2 data ranks
        "sequence_length": 1024,
        "recompute": recompute,
        "optimizer": rng.choice(("AdamW", "AdamW", "SGD", "Muon")),
        "sharding": rng.choice(("auto", "auto", "zero1", "replicate")),
    }
    return {
        "processes": rng.choice((1, 2, 2)),
        "settings": settings,
        "bandwidth": rng.choice((0.02, 1.0)),
        "share": rng.random(),
    }


def test_a_single_process_tries_sizes_that_are_predicted_to_fit() -> None:
    """With one process, excess over the prediction is not assumed to grow with the rows."""
    predicted = {1: 10, 2: 20, 4: 40, 8: 80}
    assert next_trial(predicted, {}, 50) == 1
    # One row took 20 more than predicted; two would need 60 if that grew with the rows.
    assert next_trial(predicted, {1: 30}, 50) is None
    assert next_trial(predicted, {1: 30}, 50, single_process=True) == 2
    # One row and two rows both took 20 more, so the excess is nearly constant.
    assert next_trial(predicted, {1: 30, 2: 40}, 65) == 4
    assert next_trial(predicted, {1: 30, 2: 40}, 64) is None
    assert next_trial(predicted, {1: 30, 2: 40}, 50, single_process=True) == 4
    assert next_trial(predicted, {1: 30, 2: 40, 4: None}, 50, single_process=True) is None


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other gaps")
def test_a_limited_process_holds_its_tensors_and_little_else() -> None:
    """Freed memory is returned to the system, and thread stacks are small."""
    (free,), (limited,) = (
        run_processes(1, RUNS, "memory_overhead", limited=limited) for limited in (False, True)
    )
    assert free["blocks"] > 63
    assert limited["blocks"] < limited["tensors"] + 1
    assert limited["stack"] < 2


def test_a_measured_cluster_respects_ulimit() -> None:
    """A layout planned for it then fits as well."""
    (memory_gib,) = run_processes(1, RUNS, "measured_in", room_bytes=1 << 30)
    assert 0.5 < memory_gib <= 1.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(CASES))
def test_random_runs_stay_within_their_memory(seed: int) -> None:
    """It trains within its limit, or reports that no size fits; two sizes larger it runs out."""
    case = random_run(seed)
    layout, settings = Layout.parse(case["layout"]), case["settings"]
    sizes = sizes_of(settings["batch_size"] // layout.data_ranks, layout.pipeline)
    run_arguments = {"layout": case["layout"], "settings": settings}
    (predictions,) = run_processes(1, RUNS, "predicted_memory", **run_arguments, sizes=sizes)
    needed_bytes = [max(_total(rank) for rank in predictions[str(size)]) for size in sizes]
    max_needed = needed_bytes[min(len(needed_bytes) - 1, 3)]
    overhead = OVERHEAD_MIB[layout.world_size] << 20
    limit = overhead + int(needed_bytes[0] + case["share"] * 1.2 * (max_needed - needed_bytes[0]))

    def run(size: int | str) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = run_processes(
            layout.world_size,
            RUNS,
            "train_within_limit",
            check=False,
            room_bytes=limit,
            size=size,
            predictions=predictions,
            **run_arguments,
        )
        return results

    auto_results = run("auto")
    print(seed, case, f"{limit / (1 << 20):.0f} MiB", sizes, auto_results)  # noqa: T201
    refused = any("refused" in rank for rank in auto_results)  # the others lose their connection
    assert refused or all("rows" in rank for rank in auto_results), auto_results
    index = -1 if refused else sizes.index(auto_results[0]["rows"])
    for size in sizes[index + 2 :][:1]:
        larger_results = run(size)
        assert any("failed" in rank for rank in larger_results), (size, auto_results)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(CASES))
def test_plans_stay_within_their_memory(seed: int) -> None:
    """All sizes that a plan says fit train within the limit; two sizes larger runs out."""
    case = random_plan(seed)
    (planned,) = run_processes(1, RUNS, "plan_run", **case)
    layout, sizes, fits = Layout.parse(planned["layout"]), planned["sizes"], planned["fits"]
    assert planned["rows"] in fits, planned
    settings = case["settings"] | planned["settings"]

    def trains(size: int) -> bool:
        ranks: list[dict[str, Any]] = run_processes(
            layout.world_size,
            RUNS,
            "train_within_limit",
            check=False,
            room_bytes=planned["memory_bytes"] + RESERVE_BYTES,
            layout=planned["layout"],
            settings=settings,
            size=size,
            predictions={},
            updates=2,
            every=True,
        )
        finished = all("rows" in rank for rank in ranks)
        assert finished or any(OUT_OF_MEMORY in rank.get("failed", "") for rank in ranks), ranks
        return finished

    trained = {size: trains(size) for size in sorted({planned["rows"], fits[-1]})}
    for size in sizes[len(fits) : len(fits) + 2]:
        if not trained.setdefault(size, trains(size)):
            break
    print(seed, case, planned, f"{planned['memory_bytes'] / (1 << 20):.0f} MiB", trained)  # noqa: T201
    assert all(trained[size] for size in trained if size in fits), trained
    assert not any(trained.get(size) for size in sizes[len(fits) + 1 :]), trained


def _total(rank: dict[str, int]) -> int:
    return sum(value for name, value in rank.items() if name != "pipeline")
