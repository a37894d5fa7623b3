"""With `reproducible=True` weights, losses and norms are bit-identical under any layout."""

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
from ms_parallel.memory.modes import SHARDINGS

RUNS = Path(__file__).parent / "reproducible_runs.py"
TIED = VARIANTS["tied grouped"]
EXPERTS = {**FAMILIES["qwen3_moe"], "num_experts": 4}


def train_jobs(count: int, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of each job, checked to be equal on all processes, with the merged state."""
    ranks = run_processes(count, RUNS, "train_jobs", jobs=jobs)
    return [_merge(results) for results in zip(*ranks, strict=True)]


def _merge(results: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    state: dict[str, str] = {}
    for result in results:
        assert result["updates"] == results[0]["updates"]
        for name, digest in result["state"].items():
            assert state.setdefault(name, digest) == digest, name
    return {"updates": results[0]["updates"], "state": state}


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Names of different tensors, and numbers of updates with different losses or norms."""
    names = first["state"].keys() | second["state"].keys()
    weights = [n for n in sorted(names) if first["state"].get(n) != second["state"].get(n)]
    updates = zip(first["updates"], second["updates"], strict=True)
    return [*weights, *(f"update {n}" for n, (x, y) in enumerate(updates) if x != y)]


def job(layout: str = "data=1", settings: Any = None, **options: Any) -> dict[str, Any]:
    """Job of a run with a layout, model settings and engine options."""
    return {"layout": layout, "settings": settings or {}, "options": options}


def test_two_processes_have_the_bits_of_one() -> None:
    """Data ranks or stages, with tied weights and clipped gradients."""
    (expected,) = train_jobs(1, [job(settings=TIED, microbatch_size=3)])
    jobs = [
        job("data=2", TIED, sharding="zero3"),
        job("data=2", TIED, sharding="replicate", microbatch_size=2),
        job("pipeline=2", TIED, schedule="zb-h1", recompute="full"),
    ]
    for run, result in zip(jobs, train_jobs(2, jobs), strict=True):
        assert not differing(result, expected), run


def check_reproduced(jobs: list[dict[str, Any]]) -> None:
    """Compare each job with the same model in one process."""
    references: dict[str, Any] = {}
    for run in jobs:
        options = {"mixed_precision": run["options"].get("mixed_precision", False)}
        reference = {"layout": "data=1", "settings": run["settings"], "options": options}
        references[str(reference)] = reference
        run["reference"] = str(reference)
    expected = dict(zip(references, train_jobs(1, list(references.values())), strict=True))
    sizes = sorted({Layout.parse(run["layout"]).world_size for run in jobs})
    for size in sizes:
        runs = [run for run in jobs if Layout.parse(run["layout"]).world_size == size]
        for run, result in zip(runs, train_jobs(size, runs), strict=True):
            assert not differing(result, expected[run["reference"]]), run


@pytest.mark.slow
def test_all_kinds_of_models_have_the_bits_of_one_process() -> None:
    """Experts, MTP layers, segments and biases; half precision; every sharding."""
    families = [FAMILIES[name] for name in ("biases", "transformer-xl", "mixtral", "deepseek_v3")]
    mtp = {**FAMILIES["glm4_moe"], "num_nextn_predict_layers": 2}
    check_reproduced(
        [
            *(job("data=2", EXPERTS, sharding=s, microbatch_size=2) for s in SHARDINGS),
            *(job("data=2", family, sharding="zero2") for family in (*families, mtp)),
            *(job("pipeline=2", family) for family in families),
            *(job("data=2", TIED, mixed_precision=m) for m in (True, "float16")),
            *(job("pipeline=2", TIED, mixed_precision=m) for m in (True, "float16")),
        ]
    )


@pytest.mark.slow
def test_three_and_four_processes_have_the_bits_of_one() -> None:
    """Replicated shards, stages and data, and every schedule with two stages per rank."""
    schedules = ("gpipe", "zb-v", "interleaved-1f1b", "dualpipe-v")
    check_reproduced(
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
def test_the_number_of_processes_may_change_between_checkpoints(tmp_path: Path) -> None:
    """4, 2, 3, 4 processes and stages: all updates and checkpoints equal one process's."""
    layouts = ("data=4", "pipeline=2", "data=3", "data=2,pipeline=2")
    for first, layout in enumerate(layouts):
        changing = {"layout": layout, "settings": TIED, "chain": "several"}
        single = {"layout": "data=1", "settings": TIED, "chain": "single"}
        results = []
        for run in (changing, single):
            count = Layout.parse(run["layout"]).world_size
            arguments = {"folder": str(tmp_path), "first": 2 * first, "last": 2 * first + 2}
            ranks = run_processes(count, RUNS, "resume_jobs", jobs=[run], **arguments)
            results += [_merge(rank_results) for rank_results in zip(*ranks, strict=True)]
        assert not differing(*results), layout


def test_without_reproducible_two_processes_differ_in_the_last_bits() -> None:
    """Shows that the comparison can fail."""
    plain = {"reproducible": False}
    (single,) = train_jobs(1, [job(settings=TIED, **plain)])
    (double,) = train_jobs(2, [job("data=2", TIED, **plain)])
    assert differing(double, single)
    assert [len(u) for u in double["updates"]] == [len(u) for u in single["updates"]]


def test_a_row_tree_does_not_depend_on_the_order_of_additions() -> None:
    """For any number of rows, split into any ranges and added in any order."""
    rng = random.Random(0)
    for rows in (*range(1, 34), 100):
        values = torch.randn(rows, dtype=torch.float32).tolist()

        def add(first: Any, second: Any) -> Any:
            return torch.tensor(first + second, dtype=torch.float32).item()

        full_tree = RowTree(rows, add)
        for row, value in enumerate(values):
            full_tree.put((0, row), value)
        for _ in range(5):
            cuts = [0, *sorted(rng.sample(range(rows + 1), min(3, rows))), rows]
            nodes: list[Any] = []
            for start, stop in itertools.pairwise(cuts):
                part = RowTree(rows, add)
                order = list(range(start, stop))
                rng.shuffle(order)
                for row in order:
                    part.put((0, row), values[row])
                assert sorted(part.nodes) == nodes_of(range(start, stop), rows)
                nodes += part.nodes.items()
            rng.shuffle(nodes)
            joined = RowTree(rows, add)
            for node, value in nodes:
                joined.put(node, value)
            assert joined.root == full_tree.root


def test_a_folded_sum_does_not_depend_on_other_rows() -> None:
    """Its error is at most one addition per level of halving."""
    for count in (1, 2, 3, 7, 64, 1000):
        x = torch.randn(5, count, generator=torch.Generator().manual_seed(count))
        folded = fold(x.clone())
        assert [fold(row.clone()).item() for row in x] == folded.tolist()
        exact, size = x.double().sum(1), x.double().abs().sum(1)
        assert ((folded - exact).abs() <= 12 * 2**-24 * size).all()  # half an ulp per level


@pytest.mark.parametrize(
    ("layout", "options", "reason"),
    [
        ({"tensor": 2}, {}, "tensor=2: products of split matrices"),
        ({"data": 2, "context": 2}, {}, "context=2: sums over a split sequence"),
        ({"data": 2, "expert": 2}, {}, "expert=2: an expert's product spans rows"),
    ],
)
def test_layouts_that_cannot_be_reproducible_are_refused(
    layout: dict[str, int], options: dict[str, Any], reason: str
) -> None:
    """Before the processes are needed."""
    with pytest.raises(LayoutError, match=reason) as caught:
        Engine("qwen3_moe", Layout(**layout), reproducible=True, **options)
    assert "\n" not in str(caught.value)
