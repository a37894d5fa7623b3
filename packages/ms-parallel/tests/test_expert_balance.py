"""The load of experts: counted and balanced alike under every layout."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from processes import run_processes

from ms_parallel import Engine
from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError

RUNS = Path(__file__).parent / "expert_runs.py"
QWEN = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.05,
}
CUTS: dict[str, dict[str, Any]] = {
    "data=1": {},
    "data=1 rows": {"microbatch_size": 1},
    "data=1 whole": {"microbatch_size": None},
    "data=1 again": {"recompute": "full"},
    "data=2": {},
    "data=2 again": {"recompute": "full", "microbatch_size": 1},
    "pipeline=2": {},
    "pipeline=2 again": {"recompute": "full", "microbatch_size": 4},
    "pipeline=2 split": {"schedule": "zb-h1", "microbatch_size": 1},
    "data=2,pipeline=2": {"microbatch_size": 1, "recompute": "full"},
}
"""Layouts, and options of the engine, under which nothing may change by a bit."""
METHODS = {
    "step": (QWEN, {"balance": "step"}),
    "sequence": (QWEN, {"balance": "sequence", "router_z_coefficient": 0.01}),
}


@cache
def everything(world: int) -> dict[str, dict[str, Any]]:
    """What all cuts of so many processes did, by cut and method, of each rank."""
    cuts = [cut for cut in CUTS if Layout.parse(cut.split()[0]).world_size == world]
    jobs = {
        f"{cut} {method}": {
            "layout": cut.split()[0],
            "settings": settings,
            "options": {**CUTS[cut], **options},
            "steps": 20,
        }
        for cut in cuts
        for method, (settings, options) in METHODS.items()
    }
    found: dict[str, dict[str, Any]] = {}
    for function in ("loads", "balance_gradients"):
        of_ranks = run_processes(world, RUNS, function, jobs=list(jobs.values()))
        found[function] = dict(zip(jobs, zip(*of_ranks, strict=True), strict=True))
    return found


def of_cut(function: str, cut: str, method: str) -> tuple[dict[str, Any], ...]:
    """What each rank found."""
    world = Layout.parse(cut.split()[0]).world_size
    ranks: tuple[dict[str, Any], ...] = everything(world)[function][f"{cut} {method}"]
    return ranks


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cut", list(CUTS)[1:])
def test_counts_and_bias_are_the_same_however_a_batch_is_cut(cut: str, method: str) -> None:
    """Over twenty updates, as whole numbers; the bias at their end bit for bit."""
    one = of_cut("loads", "data=1", method)[0]
    biases: dict[str, Any] = {}
    for many in of_cut("loads", cut, method):
        assert many["counts"] == one["counts"]
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert many["balance"] == pytest.approx(one["balance"], rel=1e-5)
        biases |= many["bias"]
    assert biases == one["bias"]
    total = 8 * 16 * METHODS[method][0]["num_experts_per_tok"]
    assert {sum(layer) for step in one["counts"] for layer in step} == {total}, "none is dropped"
    assert one["counts"][0] != one["counts"][-1], "the weights must really move"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cut", list(CUTS)[1:])
def test_the_gradient_of_the_balance_loss_is_the_same_to_the_bit(cut: str, method: str) -> None:
    """For the logits of every token and layer."""
    one = of_cut("balance_gradients", "data=1", method)[0]
    many: dict[str, Any] = {}
    for rank in of_cut("balance_gradients", cut, method):
        many |= rank
    assert len(one) == 8 * 3
    assert many == one
    assert any(value for row in one.values() for token in row for value in token)


def test_a_checkpoint_holds_what_balance_depends_on(tmp_path: Path) -> None:
    """Who loads it goes on bit for bit; under another layout counts are the same too."""
    jobs = [
        {"layout": "data=2", "other": "pipeline=2", "settings": settings, "options": options}
        for settings, options in METHODS.values()
    ]
    ranks = run_processes(2, RUNS, "interrupted", jobs=jobs, folder=str(tmp_path))
    for job in zip(*ranks, strict=True):
        for rank in job:
            assert rank["again"] == rank["on"]
            assert rank["other"]["counts"] == rank["on"]["counts"]
            assert rank["other"]["loss"] == pytest.approx(rank["on"]["loss"], rel=1e-5)
            assert rank["on"]["balance"] > 0


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("qwen3_moe", {"balance": "microbatch"}, "microbatch_size and the layout; choose 'step'"),
        ("qwen3_moe", {"balance": "aux_loss"}, "microbatch_size and the layout; choose 'step'"),
        ("qwen3_moe", {"balance": "stp"}, "did you mean 'step'"),
        ("qwen3_moe", {"balance": "bias"}, "a bias that this model's routers do not have"),
        ("llama", {"balance": "step"}, "the model has no experts to balance"),
        ("llama", {"router_z_coefficient": 0.1}, "the model has no experts to balance"),
        ("qwen3_moe", {"balance_coefficient": -1.0}, "balance_coefficient"),
    ],
)
def test_a_balance_that_cannot_be_is_refused(
    model: str, options: dict[str, Any], says: str
) -> None:
    """The loss of the peers, whose size changes with the cut of the batch, by its name."""
    with pytest.raises(ConfigError, match=says):
        Engine(model, **options)
