"""With `reproducible=True` weights, losses and norms are the same to the bit under any layout."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from runs import FAMILIES, VARIANTS

from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.reproducible.tree import RowTree, fold, nodes_of
from ms_parallel.errors import LayoutError
from ms_parallel.split.data_axis import SHARDINGS

RUNS = Path(__file__).parent / "reproducible_runs.py"
TIED = VARIANTS["tied grouped"]
EXPERTS = {**FAMILIES["qwen3_moe"], "num_experts": 4}


def repeated(count: int, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each job told, the same on all of its processes, and all that they hold."""
    of_ranks = run_processes(count, RUNS, "repeated", jobs=jobs)
    return [_joined(of_job) for of_job in zip(*of_ranks, strict=True)]


def _joined(of_job: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    state: dict[str, str] = {}
    for each in of_job:
        assert each["told"] == of_job[0]["told"]
        for name, digest in each["state"].items():
            assert state.setdefault(name, digest) == digest, name
    return {"told": of_job[0]["told"], "state": state}


def differing(found: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is not the same, and numbers of the first updates that told otherwise."""
    names = found["state"].keys() | other["state"].keys()
    weights = [n for n in sorted(names) if found["state"].get(n) != other["state"].get(n)]
    told = zip(found["told"], other["told"], strict=True)
    return [*weights, *(f"update {n}" for n, (x, y) in enumerate(told) if x != y)]


def job(layout: str = "data=1", settings: Any = None, **options: Any) -> dict[str, Any]:
    """One run."""
    return {"layout": layout, "settings": settings or {}, "options": options}


def test_two_processes_come_to_the_bits_of_one() -> None:
    """Shared out over data or cut into stages, with tied weights and clipped gradients."""
    (one,) = repeated(1, [job(settings=TIED, microbatch_size=3)])
    jobs = [
        job("data=2", TIED, sharding="zero3"),
        job("data=2", TIED, sharding="replicate", microbatch_size=2),
        job("pipeline=2", TIED, schedule="zb-h1", recompute="full"),
    ]
    for each, found in zip(jobs, repeated(2, jobs), strict=True):
        assert not differing(found, one), each


def reproduced(jobs: list[dict[str, Any]]) -> None:
    """Hold each job against the same model in one process."""
    alone: dict[str, Any] = {}
    for each in jobs:
        same = {"mixed_precision": each["options"].get("mixed_precision", False)}
        one = {"layout": "data=1", "settings": each["settings"], "options": same}
        alone[str(one)] = one
        each["alone"] = str(one)
    known = dict(zip(alone, repeated(1, list(alone.values())), strict=True))
    sizes = sorted({Layout.parse(each["layout"]).world_size for each in jobs})
    for size in sizes:
        mine = [each for each in jobs if Layout.parse(each["layout"]).world_size == size]
        for each, found in zip(mine, repeated(size, mine), strict=True):
            assert not differing(found, known[each["alone"]]), each


@pytest.mark.slow
def test_models_of_every_kind_come_to_the_bits_of_one_process() -> None:
    """Experts, prediction layers, segments, biases; half precision; every way of sharing out."""
    families = [FAMILIES[name] for name in ("biases", "transformer-xl", "mixtral", "deepseek_v3")]
    further = {**FAMILIES["glm4_moe"], "num_nextn_predict_layers": 2}
    reproduced(
        [
            *(job("data=2", EXPERTS, sharding=s, microbatch_size=2) for s in SHARDINGS),
            *(job("data=2", each, sharding="zero2") for each in (*families, further)),
            *(job("pipeline=2", each) for each in families),
            *(job("data=2", TIED, mixed_precision=m) for m in (True, "float16")),
            *(job("pipeline=2", TIED, mixed_precision=m) for m in (True, "float16")),
        ]
    )


@pytest.mark.slow
def test_three_and_four_processes_come_to_the_bits_of_one() -> None:
    """Copies of shards, stages and data, and every schedule of two stages a rank too."""
    schedules = ("gpipe", "zb-v", "interleaved-1f1b", "dualpipe-v")
    reproduced(
        [
            job("data=3", TIED, sharding="zero3"),
            job("data=3", EXPERTS, sharding="replicate"),
            job("pipeline=3", TIED),
            job("data=4", TIED, sharding="zero2"),
            job("data=4,replicate=2", EXPERTS, sharding="zero3"),
            job("data=4,replicate=4", TIED),
            job("data=2,pipeline=2", TIED, schedule="zb-h1"),
            job("data=2,pipeline=2", EXPERTS, recompute="full"),
            *(job("pipeline=2", {**TIED, "num_hidden_layers": 4}, schedule=s) for s in schedules),
        ]
    )


@pytest.mark.slow
def test_widths_may_change_from_checkpoint_to_checkpoint(tmp_path: Path) -> None:
    """4, 2, 3, 4 and stages: each update of each part, and what is saved, as in one process."""
    layouts = ("data=4", "pipeline=2", "data=3", "data=2,pipeline=2")
    for first, layout in enumerate(layouts):
        several = {"layout": layout, "settings": TIED, "chain": "several"}
        alone = {"layout": "data=1", "settings": TIED, "chain": "alone"}
        found = []
        for each in (several, alone):
            count = Layout.parse(each["layout"]).world_size
            arguments = {"folder": str(tmp_path), "first": 2 * first, "last": 2 * first + 2}
            of_ranks = run_processes(count, RUNS, "resumed", jobs=[each], **arguments)
            found += [_joined(of_job) for of_job in zip(*of_ranks, strict=True)]
        assert not differing(*found), layout


def test_without_it_two_processes_differ_in_last_bits() -> None:
    """So that the comparison can fail."""
    plain = {"reproducible": False}
    (one,) = repeated(1, [job(settings=TIED, **plain)])
    (two,) = repeated(2, [job("data=2", TIED, **plain)])
    assert differing(two, one)
    assert [len(each) for each in two["told"]] == [len(each) for each in one["told"]]


def test_a_tree_over_rows_does_not_depend_on_who_adds_up_what() -> None:
    """Any number of rows, any cut into runs of rows, put in any order."""
    chance = random.Random(0)
    for rows in (*range(1, 34), 100):
        values = torch.randn(rows, dtype=torch.float32).tolist()

        def add(first: Any, second: Any) -> Any:
            return torch.tensor(first + second, dtype=torch.float32).item()

        whole = RowTree(rows, add)
        for row, value in enumerate(values):
            whole.put((0, row), value)
        for _ in range(5):
            cuts = [0, *sorted(chance.sample(range(rows + 1), min(3, rows))), rows]
            left: list[Any] = []
            for start, stop in itertools.pairwise(cuts):
                part = RowTree(rows, add)
                order = list(range(start, stop))
                chance.shuffle(order)
                for row in order:
                    part.put((0, row), values[row])
                assert sorted(part.nodes) == nodes_of(range(start, stop), rows)
                left += part.nodes.items()
            chance.shuffle(left)
            joined = RowTree(rows, add)
            for node, value in left:
                joined.put(node, value)
            assert joined.root == whole.root


def test_a_folded_sum_does_not_depend_on_the_rows_beside_it() -> None:
    """Nor is it further from the sum than an addition a level of halves."""
    for count in (1, 2, 3, 7, 64, 1000):
        x = torch.randn(5, count, generator=torch.Generator().manual_seed(count))
        together = fold(x.clone())
        assert [fold(row.clone()).item() for row in x] == together.tolist()
        exact, size = x.double().sum(1), x.double().abs().sum(1)
        assert ((together - exact).abs() <= 12 * 2**-24 * size).all()  # levels, each half an ulp


@pytest.mark.parametrize(
    ("layout", "options", "why"),
    [
        ({"tensor": 2}, {}, "tensor=2: products of split matrices"),
        ({"data": 2, "context": 2}, {}, "context=2: sums over a split sequence"),
        ({"data": 2, "expert": 2}, {}, "expert=2: an expert's product spans rows"),
    ],
)
def test_what_cannot_be_reproduced_is_refused_with_the_reason(
    layout: dict[str, int], options: dict[str, Any], why: str
) -> None:
    """Before a process is asked for."""
    with pytest.raises(LayoutError, match=why) as caught:
        Engine("qwen3_moe", Layout(**layout), reproducible=True, **options)
    assert "\n" not in str(caught.value)
