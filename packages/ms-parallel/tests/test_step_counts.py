"""Collectives and host synchronizations of one optimizer step, for each kind of layout.

They are counted on an emulated accelerator, which shows copies to the host. The model has two
layers. The host waits once at the end of a step, for the loss and the gradient norm, and with
several data ranks also before the first forward pass, for the number of targets on each.
"""

from pathlib import Path
from typing import Any

from ms_rig import run_on_rig

RUNS = Path(__file__).parent / "step_runs.py"
SPLIT = {"microbatch_size": 1}
"""Four microbatches in one process, two on each of two data ranks."""
MOE = "qwen3_moe"
Expected = tuple[str, str, dict[str, Any], dict[str, int]]
"""Layout, family (empty: dense), engine settings, counts."""

ONE_PROCESS: list[Expected] = [
    ("data=1", "", {}, {"host sync": 1}),
    ("data=1", "", SPLIT, {"host sync": 1}),
    ("data=1", "", {"mixed_precision": "float16"}, {"host sync": 1}),
    # The load of the experts and the sums of their losses.
    ("data=1", MOE, {}, {"host sync": 3}),
    # Results and norms are added in one order on the host.
    ("data=1", "", {"reproducible": True}, {"host sync": 3}),
    # The audit's own sums.
    ("data=1", "", {"audit_every": 2, "mixed_precision": True}, {"host sync": 2}),
]
TWO_PROCESSES: list[Expected] = [
    # Weights are gathered for each microbatch; gradients are reduced after the last one.
    (
        "data=2",
        "",
        SPLIT,
        {"all_gather": 8, "reduce_scatter": 3, "all_reduce": 1, "host sync": 2},
    ),
    # The count of targets, the gradients in one message, the totals.
    (
        "data=2",
        "",
        {**SPLIT, "sharding": "replicate"},
        {"all_gather": 1, "all_reduce": 2, "host sync": 2},
    ),
    (
        "data=2",
        "",
        {**SPLIT, "sharding": "zero1"},
        {"all_gather": 4, "reduce_scatter": 3, "all_reduce": 1, "host sync": 2},
    ),
    # Gradients are reduced after each of the two microbatches.
    (
        "data=2",
        "",
        {**SPLIT, "sharding": "zero2"},
        {"all_gather": 4, "reduce_scatter": 6, "all_reduce": 1, "host sync": 2},
    ),
    (
        "data=2",
        "",
        {"reproducible": True},
        {"all_gather": 9, "all_to_all": 1, "all_reduce": 1, "host sync": 5},
    ),
    # Every microbatch gathers and scatters the sequence around each half of a layer.
    (
        "tensor=2",
        "",
        SPLIT,
        {"all_gather": 40, "reduce_scatter": 40, "all_reduce": 10, "host sync": 1},
    ),
    # An activation and its gradient per microbatch.
    ("pipeline=2", "", SPLIT, {"send": 4, "receive": 4, "all_reduce": 1, "host sync": 1}),
    (
        "context=2",
        "",
        SPLIT,
        {"all_gather": 23, "reduce_scatter": 11, "all_reduce": 1, "host sync": 1},
    ),
    # Tokens are sent to their experts and back; the host reads the counts.
    (
        "data=2,expert=2",
        MOE,
        SPLIT,
        {"all_gather": 11, "reduce_scatter": 4, "all_to_all": 20, "all_reduce": 3, "host sync": 8},
    ),
]


def check(processes: int, expected: list[Expected]) -> None:
    """Compare the counts of a step on every process."""
    jobs = [
        {"layout": layout, "family": family, "engine": engine}
        for layout, family, engine, _ in expected
    ]
    for counts in run_on_rig(processes, RUNS, "count_steps", jobs=jobs):
        measured = [(*job[:3], count) for job, count in zip(expected, counts, strict=True)]
        assert measured == expected


def test_a_step_in_one_process_synchronizes_once() -> None:
    """Experts, reproducible sums and audits need more synchronizations."""
    check(1, ONE_PROCESS)


def test_a_step_of_two_processes_has_these_collectives() -> None:
    """Counts are exact for each parallel axis; the totals of a step take one all-reduce."""
    check(2, TWO_PROCESSES)
