"""The largest microbatch that fits is found, and no run it is found for runs out of memory."""

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
RAN_OUT = "can't allocate memory"
"""What torch says where a limit refuses it memory."""
TAKEN_MIB = {1: 40, 2: 120}
"""What the threads of so many processes take, beside their tensors."""


def drawn(seed: int) -> dict[str, Any]:
    """A run, and more memory than its smallest microbatch is predicted to need, by chance."""
    chance = random.Random(seed)
    hidden = chance.choice((96, 128, 192))
    layers = chance.choice((2, 4))
    model = {
        "hidden_size": hidden,
        "intermediate_size": chance.choice((2, 3, 4)) * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": chance.choice((2, 4)),
        "num_hidden_layers": layers,
        "vocab_size": chance.choice((512, 2048, 8192)),
    }
    layout = chance.choice(("data=1", "data=2", "tensor=2", "pipeline=2"))
    settings = {
        "model_config": model,
        "batch_size": chance.choice((12, 16, 24)),
        "sequence_length": 512,
        "recompute": chance.choice(("none", "none", "selective", "full")),
        "optimizer": chance.choice(("AdamW", "AdamW", "SGD", "Muon")),
    }
    if layout == "data=2":
        settings["sharding"] = chance.choice(("auto", "zero1", "zero3"))
    return {"layout": layout, "settings": settings, "share": chance.random()}


def drawn_to_plan(seed: int) -> dict[str, Any]:
    """A run that is to be planned, links and a share of memory, by chance."""
    chance = random.Random(1000 + seed)
    hidden, recompute = (
        chance.choice((64, 96)),
        chance.choice(("none", "none", "full", "selective")),
    )
    model = {
        "hidden_size": hidden,
        "intermediate_size": chance.choice((2, 3, 4)) * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": chance.choice((2, 4)),
        "num_hidden_layers": chance.choice((4, 8)),
        # Where blocks keep little, a row's logits make up for it.
        "vocab_size": chance.choice((256, 2048) if recompute == "none" else (2048, 4096)),
    }
    settings = {
        "model_config": model,
        "batch_size": chance.choice((6, 8, 9, 10)),  # 9 rows do not divide over 2 data ranks
        "sequence_length": 1024,
        "recompute": recompute,
        "optimizer": chance.choice(("AdamW", "AdamW", "SGD", "Muon")),
        "sharding": chance.choice(("auto", "auto", "zero1", "replicate")),
    }
    return {
        "processes": chance.choice((1, 2, 2)),
        "settings": settings,
        "bandwidth": chance.choice((0.02, 1.0)),
        "share": chance.random(),
    }


def test_a_rank_that_nobody_waits_for_tries_what_is_predicted_to_fit() -> None:
    """What the smallest took above its prediction need not grow with the rows."""
    predicted = {1: 10, 2: 20, 4: 40, 8: 80}
    assert next_trial(predicted, {}, 50) == 1
    # 20 above for a row: two would take 60 if that grew.
    assert next_trial(predicted, {1: 30}, 50) is None
    assert next_trial(predicted, {1: 30}, 50, single_process=True) == 2
    # Of two trials: 20 above for one row and for two, so that a quarter of 10 grows with each.
    assert next_trial(predicted, {1: 30, 2: 40}, 65) == 4
    assert next_trial(predicted, {1: 30, 2: 40}, 64) is None
    assert next_trial(predicted, {1: 30, 2: 40}, 50, single_process=True) == 4
    assert next_trial(predicted, {1: 30, 2: 40, 4: None}, 50, single_process=True) is None


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other gaps")
def test_a_limited_process_holds_its_tensors_and_little_else() -> None:
    """What comes back is given back, and stacks of threads are small."""
    (free,), (limited,) = (
        run_processes(1, RUNS, "kept_in_gaps", limited=each) for each in (False, True)
    )
    assert free["blocks"] > 63
    assert limited["blocks"] < limited["tensors"] + 1
    assert limited["stack"] < 2


def test_a_measured_cluster_has_no_more_memory_than_ulimit_leaves() -> None:
    """So that what is planned on it does not run out of memory either."""
    (found,) = run_processes(1, RUNS, "measured_in", room_bytes=1 << 30)
    assert 0.5 < found <= 1.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(CASES))
def test_no_drawn_run_takes_more_than_there_is(seed: int) -> None:
    """It trains in its memory, and a size two further up does not; where none fits, it says so."""
    case = drawn(seed)
    layout, settings = Layout.parse(case["layout"]), case["settings"]
    sizes = sizes_of(settings["batch_size"] // layout.data_ranks, layout.pipeline)
    given = {"layout": case["layout"], "settings": settings}
    (foretold,) = run_processes(1, RUNS, "foretold", **given, sizes=sizes)
    need = [max(_total(rank) for rank in foretold[str(size)]) for size in sizes]
    most = need[min(len(need) - 1, 3)]
    taken = TAKEN_MIB[layout.world_size] << 20
    room = taken + int(need[0] + case["share"] * 1.2 * (most - need[0]))

    def run(size: int | str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = run_processes(
            layout.world_size,
            RUNS,
            "trained",
            check=False,
            room_bytes=room,
            size=size,
            foretold=foretold,
            **given,
        )
        return found

    found = run("auto")
    print(seed, case, f"{room / (1 << 20):.0f} MiB", sizes, found)  # noqa: T201
    refused = any("refused" in rank for rank in found)  # the others lose their connection
    assert refused or all("rows" in rank for rank in found), found
    place = -1 if refused else sizes.index(found[0]["rows"])
    for size in sizes[place + 2 :][:1]:
        tried = run(size)
        assert any("failed" in rank for rank in tried), (size, found)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(CASES))
def test_no_plan_takes_more_than_it_may(seed: int) -> None:
    """Whatever it takes to fit trains in its memory, and a size two further up does not."""
    case = drawn_to_plan(seed)
    (found,) = run_processes(1, RUNS, "planned", **case)
    layout, sizes, fits = Layout.parse(found["layout"]), found["sizes"], found["fits"]
    assert found["rows"] in fits, found
    settings = case["settings"] | found["settings"]

    def trains(size: int) -> bool:
        ranks: list[dict[str, Any]] = run_processes(
            layout.world_size,
            RUNS,
            "trained",
            check=False,
            room_bytes=found["memory_bytes"] + RESERVE_BYTES,
            layout=found["layout"],
            settings=settings,
            size=size,
            foretold={},
            updates=2,
            every=True,
        )
        ended = all("rows" in rank for rank in ranks)
        assert ended or any(RAN_OUT in rank.get("failed", "") for rank in ranks), ranks
        return ended

    tried = {size: trains(size) for size in sorted({found["rows"], fits[-1]})}
    for size in sizes[len(fits) : len(fits) + 2]:
        if not tried.setdefault(size, trains(size)):
            break
    print(seed, case, found, f"{found['memory_bytes'] / (1 << 20):.0f} MiB", tried)  # noqa: T201
    assert all(tried[size] for size in tried if size in fits), tried
    assert not any(tried.get(size) for size in sizes[len(fits) + 1 :]), tried


def _total(rank: dict[str, int]) -> int:
    return sum(value for name, value in rank.items() if name != "pipeline")
