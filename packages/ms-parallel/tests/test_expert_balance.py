"""Expert loads are counted and balanced the same under every layout."""

from functools import cache
from pathlib import Path
from typing import Any

import expert_runs
import pytest
import torch
from processes import run_processes
from runs import tiny
from safetensors.torch import load_file
from transformers_models import hf_model

from ms_parallel import Engine
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.balance.balancer import ExpertLoad
from ms_parallel.errors import ConfigError
from ms_parallel.models import TransformersModel
from ms_parallel.models.experts.router import Router
from ms_parallel.models.experts.router_config import RouterConfig
from ms_parallel.models.experts.router_stats import DocumentNumbers, RouterStats
from ms_parallel.models.registry import build_model
from ms_parallel.weights import initialize, save_model

RUNS = Path(__file__).parent / "expert_runs.py"
QWEN = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.05,
}
SLOW = pytest.mark.slow
CUTS: dict[str, dict[str, Any]] = {
    "data=1": {},
    "data=1 rows": {"microbatch_size": 1, "recompute": "full"},
    "data=1 whole": {"microbatch_size": None},
    "data=1 again": {"recompute": "full"},
    "data=2": {},
    "data=2 again": {"recompute": "full", "microbatch_size": 4},
    "pipeline=2": {"recompute": "full"},
    "pipeline=2 whole": {"microbatch_size": 4},
    "pipeline=2 split": {"schedule": "zb-h1", "microbatch_size": 1},
    "data=2,pipeline=2": {"microbatch_size": 1},
    "data=2,expert=2": {},
    "data=2,expert=2 again": {"recompute": "full", "microbatch_size": 1},
    "data=2,pipeline=2,expert=2": {"microbatch_size": 1, "schedule": "zb-h1"},
    "data=4,expert=2": {},
    "data=4,expert=2 again": {"recompute": "full"},
}
"""Layouts and engine options that must give the same bits."""
OTHERS = [
    "data=1 rows",
    "data=2",
    "pipeline=2",
    "data=2,expert=2 again",
    *(
        pytest.param(cut, marks=SLOW)
        for cut in CUTS
        if cut not in ("data=1", "data=1 rows", "data=2", "pipeline=2", "data=2,expert=2 again")
    ),
]
GLM = {
    "model_type": "glm4_moe",
    "num_hidden_layers": 3,
    "attention_bias": True,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}
METHODS = {
    "step": (QWEN, {"balance": "step"}),
    "sequence": (QWEN, {"balance": "sequence", "router_z_loss_coefficient": 0.01}),
    "bias": (GLM, {"balance_coefficient": 0.01, "balance_bias_rate": 0.02}),
}
STEPS = {"bias": 8}
"""Number of updates; by default 4."""


def jobs_of(cut: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Jobs of a case: trainings, and gradients of two models."""
    shared = {"layout": cut.split()[0]}
    cases = [
        {
            **shared,
            "settings": settings,
            "options": {**CUTS[cut], **options},
            "steps": STEPS.get(method, 4),
        }
        for method, (settings, options) in METHODS.items()
    ]
    return {
        "loads": cases,
        "random": cases,
        "exact": [{**case, "folder": str(folder)} for case in cases[:2]],
    }


@cache
def case_results(cut: str, folder: Path) -> dict[str, list[tuple[dict[str, Any], ...]]]:
    """Results of a case: for each method, a result per rank."""
    world_size, jobs = Layout.parse(cut.split()[0]).world_size, jobs_of(cut, folder)
    ranks = run_processes(world_size, RUNS, "loads_and_gradients", jobs=jobs)
    return {name: list(zip(*(rank[name] for rank in ranks), strict=True)) for name in jobs}


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits do not depend on the number of rows in a forward pass.

    Matrix products of other sizes round differently. Here attention and experts add zeros, and a
    logit is one feature of the normalized embedding times a power of two.
    """
    folder = tmp_path_factory.mktemp("exact")
    model = build_model(tiny(**QWEN))
    initialize(model, 5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            if name.endswith("mlp.gate.weight"):
                parameter.copy_(torch.eye(*parameter.shape) * 4)
    save_model(model, folder)
    return folder


@pytest.mark.parametrize("cut", OTHERS)
def test_counts_and_biases_do_not_depend_on_layout_and_microbatches(cut: str, exact: Path) -> None:
    """Integer counts are equal, also with a bias over eight updates, which is equal to the bit."""
    for index, (settings, _) in enumerate(METHODS.values()):
        expected = case_results("data=1", exact)["loads"][index][0]
        biases: dict[str, Any] = {}
        for result in case_results(cut, exact)["loads"][index]:
            assert result["counts"] == expected["counts"]
            assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
            assert result["balance"] == pytest.approx(expected["balance"], rel=1e-5)
            biases |= result["bias"]
        assert biases == expected["bias"]
        assert ("n_routed_experts" in settings) == any(map(any, biases.values()))
        total = 4 * 16 * settings["num_experts_per_tok"]
        assert {sum(layer) for step in expected["counts"] for layer in step} == {total}, (
            "token lost"
        )
        assert expected["counts"][0] != expected["counts"][-1], "the weights must really change"


@pytest.mark.parametrize("cut", OTHERS)
def test_gradients_of_the_balance_loss_are_bit_identical(cut: str, exact: Path) -> None:
    """For the logits of every token and layer, if the logits themselves are equal.

    They are in the exact model, and in a random one whose microbatches have the same size and whose
    experts process one microbatch at a time.
    """
    same_size = CUTS[cut].get("microbatch_size", 2) == 2 and "expert" not in cut
    for model in ("exact", "random") if same_size else ("exact",):
        for index, ranks in enumerate(case_results(cut, exact)[model]):
            expected = case_results("data=1", exact)[model][index][0]
            merged: dict[str, Any] = {}
            for rank in ranks:
                merged |= rank
            assert len(expected) == 4 * 2
            assert merged == expected
            assert any(value for row in expected.values() for token in row for value in token)


def test_a_checkpoint_holds_the_state_of_balance(tmp_path: Path) -> None:
    """A resumed engine gives the same bits; under another layout the counts are equal too."""
    jobs = [
        {"layout": "data=2", "other": "pipeline=2", "settings": settings, "options": options}
        for settings, options in METHODS.values()
    ]
    ranks = run_processes(2, RUNS, "resume_jobs", jobs=jobs, folder=str(tmp_path))
    for job in zip(*ranks, strict=True):
        for rank in job:
            assert rank["resumed"] == rank["uninterrupted"]
            assert rank["other"]["counts"] == rank["uninterrupted"]["counts"]
            assert rank["other"]["loss"] == pytest.approx(rank["uninterrupted"]["loss"], rel=1e-5)
            assert rank["uninterrupted"]["balance"] > 0
    biases = {name: b for rank in ranks for name, b in rank[2]["uninterrupted"]["bias"].items()}
    assert len(biases) == 2
    saved = {n: b.tolist() for n, b in load_file(tmp_path / "2 model/model.safetensors").items()}
    for name, bias in biases.items():
        changes = [abs(new - old) for new, old in zip(bias, saved[name], strict=True)]
        assert max(changes) == pytest.approx(0.02, rel=1e-5), "the folder has the previous step's"


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("qwen3_moe", {"balance": "microbatch"}, "microbatch_size and the layout; use 'step'"),
        ("qwen3_moe", {"balance": "aux_loss"}, "microbatch_size and the layout; use 'step'"),
        ("qwen3_moe", {"balance": "stp"}, "did you mean 'step'"),
        ("qwen3_moe", {"balance": "bias"}, "needs routers with a score correction bias"),
        ("llama", {"balance": "step"}, "need a mixture of experts"),
        ("llama", {"router_z_loss_coefficient": 0.1}, "need a mixture of experts"),
        ("qwen3_moe", {"balance_coefficient": -1.0}, "balance_coefficient"),
    ],
)
def test_invalid_balance_settings_are_refused(
    model: str, options: dict[str, Any], message: str
) -> None:
    """Including the usual loss of other libraries, which depends on the microbatch size."""
    with pytest.raises(ConfigError, match=message):
        Engine(model, **options)


FOREIGN = {
    "qwen3_moe": {"norm_topk_prob": True},
    "mixtral": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {},
}
HF_BALANCE = {"output_router_logits": True, "router_aux_loss_coef": 2.0}


def hf_job(family: str, folder: Path) -> dict[str, Any]:
    """A job with a tiny model that transformers built and saved, without ignored rows."""
    hf_model(family, pad_token_id=None, **FOREIGN[family], **HF_BALANCE).save_pretrained(folder)
    return {"layout": "data=1", "folder": str(folder), "steps": 3, "options": {}}


@pytest.mark.parametrize("method", ["step", "sequence"])
@pytest.mark.parametrize("family", FOREIGN)
def test_experts_of_transformers_models_are_balanced_as_ours(
    family: str, method: str, tmp_path: Path
) -> None:
    """Same counts, balance losses and, after three updates, losses as our native family."""
    job = hf_job(family, tmp_path)
    options = {"balance": method, "router_z_loss_coefficient": 0.01}
    variants = ({}, {"foreign": True}, {"foreign": True, "options": {"balance": "none"}})
    jobs = [{**job, "options": options, **variant} for variant in variants]
    ours, foreign, unbalanced = expert_runs.loads(jobs)
    assert foreign["counts"] == ours["counts"]
    assert foreign["balance"] == pytest.approx(ours["balance"], rel=1e-4)
    assert foreign["losses"] == pytest.approx(ours["losses"], rel=1e-5)
    assert foreign["balance"][-1] > 1.0
    assert foreign["losses"] != pytest.approx(unbalanced["losses"], rel=1e-5), "the loss must count"


@pytest.mark.parametrize(
    "layout", ["tensor=2", *(pytest.param(name, marks=SLOW) for name in ("data=2", "pipeline=2"))]
)
def test_balance_of_transformers_experts_does_not_depend_on_the_layout(
    layout: str, tmp_path: Path
) -> None:
    """With recomputation, and although every tensor rank routes all positions."""
    job = {**hf_job("qwen3_moe", tmp_path), "foreign": True}
    expected = expert_runs.loads([job])[0]
    recomputed = {"recompute": "full", "microbatch_size": 1}
    ranks = run_processes(2, RUNS, "loads", jobs=[{**job, "layout": layout, "options": recomputed}])
    for (result,) in ranks:
        assert result["counts"] == expected["counts"]
        assert result["balance"] == pytest.approx(expected["balance"], rel=1e-5)
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)


def test_balance_is_enabled_as_in_transformers(tmp_path: Path) -> None:
    """By `output_router_logits`; otherwise a run must set the coefficient."""
    hf_model("qwen3_moe").save_pretrained(tmp_path)
    model = TransformersModel(tmp_path)
    assert Engine(model, device="cpu").balancer.balance.method == "none"
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef; set balance_coefficient"):
        Engine(model, device="cpu", balance="step")
    assert Engine(model, device="cpu", balance="step", balance_coefficient=0.1).balancer.layers


def test_routers_are_detected_under_any_default_dtype() -> None:
    """A proof computes in float64, and ERNIE's router casts its input."""
    small = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 48}
    torch.set_default_dtype(torch.float64)
    try:
        ernie = {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2}
        assert TransformersModel({**small, **ernie}).mixture is None
        olmoe = {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2}
        mixture = TransformersModel({**small, **olmoe}).mixture
        assert mixture is not None
        assert mixture.choice == RouterConfig(num_experts=4, num_experts_per_tok=2)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_layer_that_no_token_reached_has_no_load() -> None:
    """Like MTP layers whose loss has weight 0."""
    load = ExpertLoad(
        layers=(0, 1),
        counts=torch.tensor([[2, 6], [0, 0]]),
        entropy=(0.0, 0.0),
        balance_loss=0.0,
        z_loss=0.0,
        bias=None,
    )
    assert load.highest_load == 1.5


def test_a_router_without_stats_computes_no_statistics() -> None:
    """An evaluation or a generation does not compute statistics."""
    choice = RouterConfig(num_experts=4, num_experts_per_tok=2, scores="sigmoid", normalized=False)
    router, hidden = Router(3, choice), torch.randn(1, 5, 3)
    torch.nn.init.normal_(router.weight)

    def sums() -> int:
        with torch.profiler.profile() as profile:
            router(hidden)
        return sum(event.count for event in profile.key_averages() if event.key == "aten::sum")

    assert sums() == 0
    router.stats = RouterStats(4, DocumentNumbers())
    assert sums() > 0
