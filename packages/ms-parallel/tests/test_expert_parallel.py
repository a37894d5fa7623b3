"""Experts shared out over processes train, are saved and are loaded as in one process."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import check, job
from processes import run_processes
from runs import FAMILIES
from torch import nn

from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.errors import ConfigError, LayoutError
from ms_parallel.models import TransformersModel
from ms_parallel.split.expert_parallel import shard_dim

HERE = Path(__file__).parent
EXPERTS, TRAINED = HERE / "expert_runs.py", HERE / "runs.py"
SEQUENCE: dict[str, Any] = {"balance": "sequence", "balance_coefficient": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {**FAMILIES["mixtral"], "num_local_experts": 8},
    "qwen3_moe": {**FAMILIES["qwen3_moe"], "num_experts": 8},
    "olmoe": {**FAMILIES["olmoe"], "num_experts": 4},
    "deepseek_v3": {**FAMILIES["deepseek_v3"], "num_nextn_predict_layers": 1},
    "glm4_moe": {**FAMILIES["glm4_moe"], "n_routed_experts": 4},
    "gpt_oss": {**FAMILIES["gpt_oss"], "num_local_experts": 4},
}
"""Every family with experts, of which there are as many as four ranks divide."""
AGAIN: dict[str, Any] = {"recompute": "full"}


def test_gradients_with_experts_shared_out_are_those_of_one_process(tmp_path: Path) -> None:
    """Shared experts and biases, recomputation, context, and a rank to which no token comes."""
    idle = {"first_experts": True, "options": {"microbatch_size": 1, **AGAIN}}
    check(
        [
            job("data=2,expert=2", MODELS["qwen3_moe"], options=SEQUENCE),
            job("data=2,expert=2", MODELS["deepseek_v3"], **idle),
            job("context=2,expert=2", MODELS["gpt_oss"], options=AGAIN),
        ],
        tmp_path,
    )


def test_gradients_of_experts_that_are_sharded_further_are_those_of_one_process(
    tmp_path: Path,
) -> None:
    """Over data ranks that have the same experts, by whole ones or not; and over tensor ranks."""
    three = {**FAMILIES["qwen3_moe"], "num_experts": 6}
    check(
        [
            job("data=4,expert=2", MODELS["qwen3_moe"], options={"microbatch_size": 1}),
            job("data=4,expert=2", three, options={"microbatch_size": 1, **AGAIN}),
            job("data=2,tensor=2,expert=2", MODELS["gpt_oss"]),
            job("data=2,pipeline=2,expert=2", MODELS["glm4_moe"], options={"microbatch_size": 1}),
        ],
        tmp_path,
    )


LAYOUTS = (
    "data=2,expert=2",
    "context=2,expert=2",
    "data=4,expert=2",
    "data=4,expert=4",
    "data=2,context=2,expert=2",
    "data=2,context=2,expert=4",
    "data=2,tensor=2,expert=2",
    "data=2,pipeline=2,expert=2",
    "data=2,tensor=2,pipeline=2,expert=2",
    "data=4,tensor=2,expert=2",
    "data=4,pipeline=2,expert=4",
    "data=2,context=2,pipeline=2,expert=2",
    "data=4,context=2,expert=4",
)


@pytest.mark.slow
def test_gradients_of_every_family_and_layout_are_those_of_one_process(tmp_path: Path) -> None:
    """Drawn layouts, families, schedules, recomputation, microbatches, lengths and documents."""
    chance = random.Random(0)
    jobs = []
    for number in range(72):
        layout, family = LAYOUTS[number % len(LAYOUTS)], chance.choice(list(MODELS))
        rows = 4 // Layout.parse(layout).data_ranks
        pipeline = "pipeline" in layout
        options = {
            "recompute": chance.choice(("none", "full")),
            "microbatch_size": 1 if pipeline else chance.choice(range(1, rows + 1)),
            **(SEQUENCE if chance.random() < 0.5 else {}),
        }
        if pipeline:
            options["schedule"] = chance.choice(("1f1b", "zb-h1"))
        length = 4 * chance.choice((3, 4, 6))  # short rows have gradients that cancel
        idle = MODELS[family].get("n_routed_experts") is not None and chance.random() < 0.5
        jobs.append(
            job(
                layout,
                MODELS[family],
                options=options,
                length=length,
                seed=number % 3,
                first_experts=idle,
                lengths=[chance.randint(1, length) for _ in range(3)],
            )
        )
    check(jobs, tmp_path)


def curves(jobs: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    """Losses and gradient norms of each job, the same from every process."""
    count = Layout.parse(jobs[0]["layout"]).world_size
    of_ranks = run_processes(count, TRAINED, "curves", jobs=jobs)
    assert all(found == of_ranks[0] for found in of_ranks)
    found: list[dict[str, list[float]]] = of_ranks[0]
    return found


def test_norms_count_each_expert_once() -> None:
    """Clipped by one process's norm, so that losses are its own; also in bfloat16."""
    plain = [{"settings": MODELS[each], "steps": 4} for each in ("qwen3_moe", "deepseek_v3")]
    jobs = [*plain, {**plain[0], "options": {"mixed_precision": True}}]
    one = curves([{**each, "layout": "data=1"} for each in jobs])
    many = curves([{**each, "layout": "data=2,expert=2"} for each in jobs])
    for alone, shared, tolerance in zip(one, many, (1e-5, 1e-5, 2e-2), strict=True):
        assert max(alone["norms"]) > 1.0, "nothing is clipped"
        for what in ("losses", "norms"):
            assert shared[what] == pytest.approx(alone[what], rel=tolerance)


def test_a_recomputation_neither_routes_nor_counts_again() -> None:
    """What it takes over are the counts; rows travel once more, each way."""
    plain = {"layout": "data=2,expert=2", "settings": MODELS["mixtral"]}
    layers, ways = 3, 2
    once = {"counted": layers, "travelled": 2 * layers * ways}
    again = {"counted": layers, "travelled": 3 * layers * ways}
    for options, right in (({}, once), (AGAIN, again)):
        found = run_processes(2, EXPERTS, "exchanges", job={**plain, "options": options})
        assert found == [right, right]


def go_through(pairs: list[tuple[str, str, str]], folder: Path) -> None:
    """Train and save under the first layout of each pair, and load under the second."""
    jobs = {
        str(number): {
            "settings": {**MODELS[family], "num_hidden_layers": 3},
            "options": {"microbatch_size": 1},
            "from": one,
            "to": other,
        }
        for number, (family, one, other) in enumerate(pairs)
    }
    results: dict[str, dict[str, Any]] = {}
    for way, function in (("from", "saved"), ("to", "loaded")):
        for count in (1, 2, 4, 8):
            chosen = {
                number: {**each, "layout": each[way]}
                for number, each in jobs.items()
                if Layout.parse(each[way]).world_size == count
            }
            ranks = run_processes(count, EXPERTS, function, jobs=chosen, folder=str(folder))
            for number in chosen:
                found = [rank[number] for rank in ranks]
                if way == "from":
                    results[number] = found[0]
                    continue
                for rank in found:
                    assert rank["wrong"] == [], pairs[int(number)]
                    assert rank["compared"] > 20
                    assert rank["counts"] == results[number]["counts"]
                    assert rank["loss"] == pytest.approx(results[number]["loss"], rel=1e-5)


def test_what_is_saved_with_experts_shared_out_is_loaded_under_any_layout(tmp_path: Path) -> None:
    """Weights and moments to the bit, from the checkpoint and the folder; the next update too."""
    go_through(
        [
            ("qwen3_moe", "data=2,expert=2", "data=1"),
            ("deepseek_v3", "data=1", "data=2,expert=2"),
            ("gpt_oss", "data=2,expert=2", "pipeline=2"),
        ],
        tmp_path,
    )


@pytest.mark.slow
def test_what_any_layout_saves_any_other_loads(tmp_path: Path) -> None:
    """Fifty drawn pairs, of up to eight processes, with four expert ranks of two data ranks."""
    chance = random.Random(1)
    plain = ("data=1", "data=2", "pipeline=2", "data=4", "tensor=2", "data=2,pipeline=2")
    most = "data=8,expert=4"
    pairs = [("qwen3_moe", most, other) for other in ("data=1", "data=2,expert=2", "pipeline=2")]
    one = (*LAYOUTS[:9], *LAYOUTS[10:12])
    for number in range(47):
        ends = [chance.choice(one), chance.choice((*LAYOUTS[:9], *plain))]
        chance.shuffle(ends)
        pairs.append((list(MODELS)[number % len(MODELS)], *ends))
    go_through(pairs, tmp_path)


@pytest.mark.parametrize(
    ("model", "layout", "why"),
    [
        ("llama", Layout(data=2, expert=2), "needs a mixture of experts, and llama is dense"),
        (
            "transformer-xl",
            Layout(data=2, expert=2),
            "needs a mixture of experts, and transformer-xl is dense",
        ),
        ("qwen3_moe", Layout(data=3, expert=3), "the model's 16 experts; use 1, 2, 4"),
        (
            nn.Embedding(2, 2),
            Layout(data=2, expert=2),
            "cannot split the experts of Embedding, a user-defined module; set expert=1",
        ),
    ],
)
def test_what_cannot_share_out_experts_is_refused_with_the_reason(
    model: Any, layout: Layout, why: str
) -> None:
    """Before a process is asked for."""
    with pytest.raises((LayoutError, ConfigError), match=why) as caught:
        Engine(model, layout)
    assert "\n" not in str(caught.value)


def test_experts_of_transformers_are_refused() -> None:
    """Its modules hold all of them."""
    from transformers import MixtralConfig

    config = MixtralConfig(vocab_size=48, hidden_size=32, num_hidden_layers=1, num_local_experts=4)
    with pytest.raises(
        LayoutError, match="is not supported for mixtral, which is built by transformers"
    ):
        Engine(TransformersModel(config), Layout(data=2, expert=2))


@pytest.mark.parametrize(
    ("shape", "parts", "dim"),
    [((4, 2, 6, 8), 2, 0), ((3, 2, 6, 8), 2, 1), ((3, 2, 6, 8), 3, 0), ((2, 9, 8), 4, 2)],
)
def test_experts_are_sharded_whole_or_along_a_dim_that_divides(
    shape: tuple[int, ...], parts: int, dim: int
) -> None:
    """As shards of another dim than the first cannot be uneven."""
    assert shard_dim(torch.empty(shape), parts) == dim
