"""Gradients under every schedule equal one process's, also with split backward passes."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from torch import nn

from ms_parallel.schedules import GENERATORS, Costs, breadth_first, interleaved_one_f_one_b, search
from ms_parallel.split.weight_gradients import DeferredWeightGrads, defer_weight_grads

SPLITS = Path(__file__).parent / "splits.py"
# Up to 13 microbatch gradients are added in a different order than in one process: a few ulps
# (2^-52, 2^-23) of the largest. Measured 3e-16 and 2e-7.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "head_dim": 4}
ROWS = {1: (4, 5), 2: (4, 5), 4: (8, 9)}
"""Numbers of microbatches that ranks divide, and that they do not; the minimum of DualPipeV. By
default only the latter are run, in float32 only with tied weights and these schedules."""
FLOAT32 = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")


def model(layers: int, **settings: Any) -> dict[str, Any]:
    """Settings of a tiny model."""
    heads = {} if settings.get("model_type") == "transformer-xl" else {"num_key_value_heads": 4}
    return {**SMALL, **heads, "num_hidden_layers": layers, **settings}


@cache
def single_process_gradients(
    layers: int, rows: int, digits: str, settings: tuple[Any, ...]
) -> dict[str, Any]:
    """Gradients of one process, one row at a time."""
    job = {"layout": "data=1", "settings": model(layers, **dict(settings)), "rows": rows}
    (results,) = run_processes(1, SPLITS, "gradients", jobs=[job], digits=digits)
    return results[0]  # type: ignore[no-any-return]


def check(
    ranks: list[dict[str, list[float]]], single_process: dict[str, list[float]], tolerance: float
) -> None:
    """Compare all ranks' gradients with one process's; a tied copy has its owner's."""
    assert set().union(*ranks) >= single_process.keys()
    for grads in ranks:
        for name, gradient in grads.items():
            expected = single_process.get(name, single_process["model.embed_tokens.weight"])
            largest = max(map(abs, expected))
            error = max(abs(a - b) for a, b in zip(gradient, expected, strict=True))
            assert error <= tolerance * largest, name


@pytest.mark.parametrize("digits", ["float64", "float32"])
@pytest.mark.parametrize(
    ("ranks", "rows"),
    [
        (2, ROWS[2][1:]),
        *(
            pytest.param(ranks, ROWS.get(ranks, (16, 17)), marks=pytest.mark.slow)
            for ranks in (1, 2, 4, 8)
        ),
    ],
)
def test_every_generator_has_the_gradients_of_one_process(
    ranks: int, rows: tuple[int, ...], digits: str
) -> None:
    """Microbatches that ranks divide and that they do not, tied and untied."""
    cases = [
        (name, count, tied)
        for name in GENERATORS
        for count in rows
        for tied in (True, False)
        if len(rows) > 1 or digits == "float64" or (tied and name in FLOAT32)
    ]
    jobs = [
        {
            "layout": f"pipeline={ranks}",
            "settings": model(2 * ranks, tie_word_embeddings=tied),
            "rows": count,
            "options": {"schedule": name},
        }
        for name, count, tied in cases
    ]
    rank_results = run_processes(ranks, SPLITS, "gradients", jobs=jobs, digits=digits)
    for index, (_, count, tied) in enumerate(cases):
        expected = single_process_gradients(
            2 * ranks, count, digits, (("tie_word_embeddings", tied),)
        )
        check([results[index] for results in rank_results], expected, TOLERANCE[digits])


LOOPS = [
    (interleaved_one_f_one_b, 1, 2),
    (interleaved_one_f_one_b, 1, 4),
    (interleaved_one_f_one_b, 2, 4),
    (interleaved_one_f_one_b, 1, 8),
    (breadth_first, 1, 4),
    (breadth_first, 2, 4),
]
"""Generator, processes and stages per process, beyond the two of named schedules."""


@pytest.mark.slow
@pytest.mark.parametrize("digits", ["float64", "float32"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_several_stages_per_process_have_the_gradients_of_one_process(
    ranks: int, digits: str
) -> None:
    """Two, four and eight stages per process, and searched schedules for unequal costs."""
    tables = [
        make(ranks, rows, stages)
        for make, processes, stages in LOOPS
        for rows in ROWS[ranks]
        if processes == ranks
    ]
    costs = Costs(
        forward=[1] * (2 * ranks - 1) + [1.7], backward_input=[1.3] * (2 * ranks),
        backward_weight=[0.7] * (2 * ranks), latency=0.1,
    )  # fmt: skip
    tables += [
        search(costs, 2 * ranks, microbatches=rows, ranks=ranks, effort=0.02).schedule
        for rows in ROWS[ranks]
    ]
    cases = [(table, tied) for table in tables for tied in (True, False)]
    jobs = [
        {
            "layout": f"pipeline={ranks}",
            "settings": model(8, tie_word_embeddings=tied),
            "rows": table.microbatches,
            "table": table.to_csv(),
        }
        for table, tied in cases
    ]
    rank_results = run_processes(ranks, SPLITS, "gradients", jobs=jobs, digits=digits)
    for index, (table, tied) in enumerate(cases):
        expected = single_process_gradients(
            8, table.microbatches, digits, (("tie_word_embeddings", tied),)
        )
        check([results[index] for results in rank_results], expected, TOLERANCE[digits])


JOBS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "recomputed": ("pipeline=2", 4, {}, {"recompute": "full"}),
    "biases": ("tensor=2,pipeline=2", 4, {"attention_bias": True, "mlp_bias": True}, {}),
    "both": ("tensor=2,pipeline=2", 4, {}, {"recompute": "full"}),
    "sharded": ("data=2,pipeline=2", 8, {}, {"recompute": "full"}),
    "uneven": ("tensor=2,pipeline=2", 4, {}, {"microbatch_size": 3}),
    "uneven shards": ("data=2,pipeline=2", 8, {}, {"microbatch_size": 3}),
    "transformer-xl": ("tensor=2,pipeline=2", 4, {"model_type": "transformer-xl"}, {}),
}
"""Layout, rows, model settings and engine options of cases that a backward pass must handle."""


SAMPLE = {
    *(("recomputed", schedule) for schedule in ("zb-h1", "zb-v")),
    ("biases", "zb-h1"),
    ("both", "zb-v"),
    ("sharded", "zb-h1"),
    ("uneven shards", "zb-v"),
    ("uneven", "zb-h1"),
    ("transformer-xl", "zb-v"),
}
"""Default cases: each job with a single schedule."""


@pytest.mark.parametrize(
    ("ranks", "run_all"),
    [(2, False), (4, False), pytest.param(4, True, marks=pytest.mark.slow)],
)
def test_split_backward_passes_work_with_recomputation_tensor_and_data_axes(
    ranks: int, run_all: bool
) -> None:
    """DTensor products, recomputed blocks and sharded weights; one stage per rank, and a V."""
    assert {name for name, _ in SAMPLE} == JOBS.keys()
    cases = [
        (layout, rows, settings, {**options, "schedule": schedule})
        for name, (layout, rows, settings, options) in JOBS.items()
        for schedule in ("zb-h1", "zb-v")
        if (2 if name == "recomputed" else 4) == ranks and (run_all or (name, schedule) in SAMPLE)
    ]
    jobs = [
        {"layout": layout, "settings": model(4, **settings), "rows": rows, "options": options}
        for layout, rows, settings, options in cases
    ]
    rank_results = run_processes(ranks, SPLITS, "gradients", jobs=jobs, digits="float32")
    for index, (_, rows, settings, _) in enumerate(cases):
        expected = single_process_gradients(4, rows, "float32", tuple(settings.items()))
        check([results[index] for results in rank_results], expected, TOLERANCE["float32"])


NAMED = """\
0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F0,0RESHARD,0UNSHARD,0WAIT_SEND_F1,0RECV_B0,0B0,\
0RECV_B1,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD
1UNSHARD,1RECV_F0,1F0,1RECV_F1,1I0,1SEND_B0,1F1,1WAIT_SEND_B0,1I1,1SEND_B1,1W0,1W1,1RESHARD,\
1REDUCE_GRAD
"""
"""All actions of torch's tables: full backward passes on one rank, split ones on the other."""


def test_explicit_actions_of_a_table_are_performed_in_place() -> None:
    """Exactly these actions gather and free weights and sum gradients."""
    rank_results = run_processes(4, SPLITS, "collectives", settings=model(4), table=NAMED, rows=4)
    gradients = [results["gradients"] for results in rank_results]
    check(gradients, single_process_gradients(4, 4, "float32", ()), TOLERANCE["float32"])
    for seen in (results["seen"] for results in rank_results):
        gathers = [name.split()[1] for name, facts in seen.items() if "gathers" in facts]
        assert all("UNSHARD" in name for name in gathers), gathers
        assert sum("UNSHARD" in name for name in seen) == len(gathers)
        sums = [name.split()[1] for name, facts in seen.items() if "sums" in facts]
        assert sums in (["0REDUCE_GRAD"], ["1REDUCE_GRAD"])
        for name, facts in seen.items():
            if "RESHARD" in name:
                assert "sharded" in facts, name
            if name[-2:] in ("F0", "F1", "B0", "B1", "I0", "I1") and "_" not in name:
                assert "sharded" not in facts, name
            if "WAIT_SEND" in name:
                assert "pending" not in facts, name


def test_deferred_weight_gradients_are_computed_by_flush() -> None:
    """Input and bias gradients come first; the deferred one equals a full backward pass's."""
    linear, x = nn.Linear(3, 2), torch.randn(4, 5, 3, requires_grad=True)
    deferred = DeferredWeightGrads()
    with defer_weight_grads(deferred):
        linear(x).square().sum().backward()
    assert linear.weight.grad is None
    assert len(deferred.factors) == 1
    expected = torch.autograd.grad(linear(x).square().sum(), [x, linear.bias, linear.weight])
    assert x.grad is not None
    assert torch.allclose(x.grad, expected[0])
    assert torch.allclose(linear.bias.grad, expected[1])
    deferred.flush()
    assert torch.allclose(linear.weight.grad, expected[2])  # type: ignore[arg-type]
    assert not deferred.factors
