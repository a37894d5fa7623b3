"""Expert parallelism trains, saves and loads like one process."""

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
"""All families with experts, whose number four ranks divide."""
RECOMPUTED: dict[str, Any] = {"recompute": "full"}


def test_expert_parallel_gradients_equal_one_process(tmp_path: Path) -> None:
    """Shared experts and biases, recomputation, context, and a rank without tokens."""
    idle = {"first_experts": True, "options": {"microbatch_size": 1, **RECOMPUTED}}
    check(
        [
            job("data=2,expert=2", MODELS["qwen3_moe"], options=SEQUENCE),
            job("data=2,expert=2", MODELS["deepseek_v3"], **idle),
            job("context=2,expert=2", MODELS["gpt_oss"], options=RECOMPUTED),
        ],
        tmp_path,
    )


def test_gradients_of_sharded_experts_equal_one_process(
    tmp_path: Path,
) -> None:
    """Sharded over data ranks with the same experts, evenly or not, and over tensor ranks."""
    six_experts = {**FAMILIES["qwen3_moe"], "num_experts": 6}
    check(
        [
            job("data=4,expert=2", MODELS["qwen3_moe"], options={"microbatch_size": 1}),
            job("data=4,expert=2", six_experts, options={"microbatch_size": 1, **RECOMPUTED}),
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
def test_gradients_of_all_families_and_layouts_equal_one_process(tmp_path: Path) -> None:
    """Random layouts, families, schedules, recomputation, microbatches, lengths and documents."""
    rng = random.Random(0)
    jobs = []
    for index in range(72):
        layout, family = LAYOUTS[index % len(LAYOUTS)], rng.choice(list(MODELS))
        rows = 4 // Layout.parse(layout).data_ranks
        pipeline = "pipeline" in layout
        options = {
            "recompute": rng.choice(("none", "full")),
            "microbatch_size": 1 if pipeline else rng.choice(range(1, rows + 1)),
            **(SEQUENCE if rng.random() < 0.5 else {}),
        }
        if pipeline:
            options["schedule"] = rng.choice(("1f1b", "zb-h1"))
        length = 4 * rng.choice((3, 4, 6))  # gradients of shorter rows cancel out
        idle = MODELS[family].get("n_routed_experts") is not None and rng.random() < 0.5
        jobs.append(
            job(
                layout,
                MODELS[family],
                options=options,
                length=length,
                seed=index % 3,
                first_experts=idle,
                lengths=[rng.randint(1, length) for _ in range(3)],
            )
        )
    check(jobs, tmp_path)


def curves(jobs: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    """Losses and gradient norms of each job, checked to be equal on all processes."""
    count = Layout.parse(jobs[0]["layout"]).world_size
    ranks = run_processes(count, TRAINED, "curves", jobs=jobs)
    assert all(rank == ranks[0] for rank in ranks)
    results: list[dict[str, list[float]]] = ranks[0]
    return results


def test_norms_count_each_expert_once() -> None:
    """Clipping uses the norm of one process, so losses are equal; also in bfloat16."""
    plain = [{"settings": MODELS[name], "steps": 4} for name in ("qwen3_moe", "deepseek_v3")]
    jobs = [*plain, {**plain[0], "options": {"mixed_precision": True}}]
    single = curves([{**job, "layout": "data=1"} for job in jobs])
    parallel = curves([{**job, "layout": "data=2,expert=2"} for job in jobs])
    for expected, actual, tolerance in zip(single, parallel, (1e-5, 1e-5, 2e-2), strict=True):
        assert max(expected["norms"]) > 1.0, "nothing is clipped"
        for key in ("losses", "norms"):
            assert actual[key] == pytest.approx(expected[key], rel=tolerance)


def test_a_recomputation_reuses_routes_and_counts() -> None:
    """It reuses the counts; rows are exchanged once more in each direction."""
    plain = {"layout": "data=2,expert=2", "settings": MODELS["mixtral"]}
    layers, directions = 3, 2
    once = {"counted": layers, "exchanged": 2 * layers * directions}
    recomputed = {"counted": layers, "exchanged": 3 * layers * directions}
    for options, expected in (({}, once), (RECOMPUTED, recomputed)):
        calls = run_processes(2, EXPERTS, "exchanges", job={**plain, "options": options})
        assert calls == [expected, expected]


def save_and_load_pairs(pairs: list[tuple[str, str, str]], folder: Path) -> None:
    """Train and save under the first layout of each pair, and load under the second."""
    jobs = {
        str(index): {
            "settings": {**MODELS[family], "num_hidden_layers": 3},
            "options": {"microbatch_size": 1},
            "from": source,
            "to": target,
        }
        for index, (family, source, target) in enumerate(pairs)
    }
    results: dict[str, dict[str, Any]] = {}
    for end, function in (("from", "save_jobs"), ("to", "load_jobs")):
        for count in (1, 2, 4, 8):
            subset = {
                key: {**job, "layout": job[end]}
                for key, job in jobs.items()
                if Layout.parse(job[end]).world_size == count
            }
            ranks = run_processes(count, EXPERTS, function, jobs=subset, folder=str(folder))
            for key in subset:
                rank_results = [rank[key] for rank in ranks]
                if end == "from":
                    results[key] = rank_results[0]
                    continue
                for result in rank_results:
                    assert result["differing"] == [], pairs[int(key)]
                    assert result["compared"] > 20
                    assert result["counts"] == results[key]["counts"]
                    assert result["loss"] == pytest.approx(results[key]["loss"], rel=1e-5)


def test_expert_parallel_checkpoints_load_under_any_layout(tmp_path: Path) -> None:
    """Weights and moments to the bit, from checkpoint and folder; the next update too."""
    save_and_load_pairs(
        [
            ("qwen3_moe", "data=2,expert=2", "data=1"),
            ("deepseek_v3", "data=1", "data=2,expert=2"),
            ("gpt_oss", "data=2,expert=2", "pipeline=2"),
        ],
        tmp_path,
    )


@pytest.mark.slow
def test_checkpoints_load_between_random_layouts(tmp_path: Path) -> None:
    """Fifty random pairs on up to eight processes, also four expert ranks over two data ranks."""
    rng = random.Random(1)
    plain = ("data=1", "data=2", "pipeline=2", "data=4", "tensor=2", "data=2,pipeline=2")
    largest = "data=8,expert=4"
    pairs = [("qwen3_moe", largest, other) for other in ("data=1", "data=2,expert=2", "pipeline=2")]
    sharded = (*LAYOUTS[:9], *LAYOUTS[10:12])
    for index in range(47):
        ends = [rng.choice(sharded), rng.choice((*LAYOUTS[:9], *plain))]
        rng.shuffle(ends)
        pairs.append((list(MODELS)[index % len(MODELS)], *ends))
    save_and_load_pairs(pairs, tmp_path)


@pytest.mark.parametrize(
    ("model", "layout", "reason"),
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
def test_unsupported_expert_parallelism_is_refused_with_the_reason(
    model: Any, layout: Layout, reason: str
) -> None:
    """Before the processes are needed."""
    with pytest.raises((LayoutError, ConfigError), match=reason) as caught:
        Engine(model, layout)
    assert "\n" not in str(caught.value)


def test_expert_parallelism_of_transformers_models_is_refused() -> None:
    """Its modules hold all experts."""
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
def test_experts_are_sharded_along_dim_0_or_a_dim_that_divides(
    shape: tuple[int, ...], parts: int, dim: int
) -> None:
    """FSDP supports uneven shards only along dim 0."""
    assert shard_dim(torch.empty(shape), parts) == dim
