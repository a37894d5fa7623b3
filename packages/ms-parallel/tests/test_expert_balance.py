"""The load of experts: counted and balanced alike under every layout."""

from functools import cache
from pathlib import Path
from typing import Any

import expert_runs
import pytest
import torch
from processes import run_processes
from runs import tiny
from safetensors.torch import load_file
from transformers_models import theirs

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
"""Layouts, and options of the engine, under which nothing may change by a bit."""
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
STEPS = {"bias": 20}
"""Updates; 4 where the gradient is the balance."""


def jobs_of(cut: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What is run under a cut: trainings, and gradients of two models."""
    same = {"layout": cut.split()[0]}
    cases = [
        {
            **same,
            "settings": settings,
            "options": {**CUTS[cut], **options},
            "steps": STEPS.get(method, 4),
        }
        for method, (settings, options) in METHODS.items()
    ]
    return {
        "loads": cases,
        "drawn": cases,
        "exact": [{**case, "folder": str(folder)} for case in cases[:2]],
    }


@cache
def ran(cut: str, folder: Path) -> dict[str, list[tuple[dict[str, Any], ...]]]:
    """What was found under a cut: for each method a result of each rank."""
    world, jobs = Layout.parse(cut.split()[0]).world_size, jobs_of(cut, folder)
    ranks = run_processes(world, RUNS, "everything", jobs=jobs)
    return {name: list(zip(*(rank[name] for rank in ranks), strict=True)) for name in jobs}


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits have no rounding that depends on how many rows pass at once.

    A matrix product of other sizes rounds otherwise. Here attention and experts add zeros, and a
    logit is one feature of the normed embedding, times a power of two.
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
def test_counts_and_bias_are_the_same_however_a_batch_is_cut(cut: str, exact: Path) -> None:
    """As whole numbers, where a bias moves over twenty updates; the bias bit for bit."""
    for number, (settings, _) in enumerate(METHODS.values()):
        one = ran("data=1", exact)["loads"][number][0]
        biases: dict[str, Any] = {}
        for many in ran(cut, exact)["loads"][number]:
            assert many["counts"] == one["counts"]
            assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
            assert many["balance"] == pytest.approx(one["balance"], rel=1e-5)
            biases |= many["bias"]
        assert biases == one["bias"]
        assert ("n_routed_experts" in settings) == any(map(any, biases.values()))
        total = 4 * 16 * settings["num_experts_per_tok"]
        assert {sum(layer) for step in one["counts"] for layer in step} == {total}, "none is lost"
        assert one["counts"][0] != one["counts"][-1], "the weights must really move"


@pytest.mark.parametrize("cut", OTHERS)
def test_the_gradient_of_the_balance_loss_is_the_same_to_the_bit(cut: str, exact: Path) -> None:
    """For the logits of every token and layer, where the logits themselves are.

    They are in the exact model, and in a drawn one whose microbatches are of the same size and
    whose experts see one microbatch at a time.
    """
    same_size = CUTS[cut].get("microbatch_size", 2) == 2 and "expert" not in cut
    for model in ("exact", "drawn") if same_size else ("exact",):
        for number, ranks in enumerate(ran(cut, exact)[model]):
            one = ran("data=1", exact)[model][number][0]
            many: dict[str, Any] = {}
            for rank in ranks:
                many |= rank
            assert len(one) == 4 * 2
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
    biases = {name: bias for rank in ranks for name, bias in rank[2]["on"]["bias"].items()}
    assert len(biases) == 2
    held = {n: b.tolist() for n, b in load_file(tmp_path / "2 model/model.safetensors").items()}
    for name, bias in biases.items():
        moved = [abs(new - old) for new, old in zip(bias, held[name], strict=True)]
        assert max(moved) == pytest.approx(0.02, rel=1e-5), "the folder has that of the step before"


@pytest.mark.parametrize(
    ("model", "options", "says"),
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
def test_a_balance_that_cannot_be_is_refused(
    model: str, options: dict[str, Any], says: str
) -> None:
    """The loss of the peers, whose size changes with the cut of the batch, by its name."""
    with pytest.raises(ConfigError, match=says):
        Engine(model, **options)


FOREIGN = {
    "qwen3_moe": {"norm_topk_prob": True},
    "mixtral": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {},
}
ASKED = {"output_router_logits": True, "router_aux_loss_coef": 2.0}


def published(family: str, folder: Path) -> dict[str, Any]:
    """A job of a tiny model that transformers builds and saves; no row is left out of training."""
    theirs(family, pad_token_id=None, **FOREIGN[family], **ASKED).save_pretrained(folder)
    return {"layout": "data=1", "folder": str(folder), "steps": 3, "options": {}}


@pytest.mark.parametrize("method", ["step", "sequence"])
@pytest.mark.parametrize("family", FOREIGN)
def test_experts_that_transformers_builds_are_balanced_as_ours(
    family: str, method: str, tmp_path: Path
) -> None:
    """The same counts, balance losses and, after three updates, losses as our own family's."""
    job = published(family, tmp_path)
    options = {"balance": method, "router_z_loss_coefficient": 0.01}
    kinds = ({}, {"foreign": True}, {"foreign": True, "options": {"balance": "none"}})
    jobs = [{**job, "options": options, **kind} for kind in kinds]
    ours, found, without = expert_runs.loads(jobs)
    assert found["counts"] == ours["counts"]
    assert found["balance"] == pytest.approx(ours["balance"], rel=1e-4)
    assert found["losses"] == pytest.approx(ours["losses"], rel=1e-5)
    assert found["balance"][-1] > 1.0
    assert found["losses"] != pytest.approx(without["losses"], rel=1e-5), "the loss must count"


@pytest.mark.parametrize(
    "layout", ["tensor=2", *(pytest.param(each, marks=SLOW) for each in ("data=2", "pipeline=2"))]
)
def test_balance_of_foreign_experts_does_not_depend_on_the_layout(
    layout: str, tmp_path: Path
) -> None:
    """Also where blocks are computed again, and each tensor rank chooses for all positions."""
    job = {**published("qwen3_moe", tmp_path), "foreign": True}
    one = expert_runs.loads([job])[0]
    again = {"recompute": "full", "microbatch_size": 1}
    many = run_processes(2, RUNS, "loads", jobs=[{**job, "layout": layout, "options": again}])
    for (found,) in many:
        assert found["counts"] == one["counts"]
        assert found["balance"] == pytest.approx(one["balance"], rel=1e-5)
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-5)


def test_balance_is_asked_for_as_transformers_asks(tmp_path: Path) -> None:
    """By `output_router_logits`; else a run has to say how much, and may."""
    theirs("qwen3_moe").save_pretrained(tmp_path)
    model = TransformersModel(tmp_path)
    assert Engine(model, device="cpu").balancer.balance.method == "none"
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef; set balance_coefficient"):
        Engine(model, device="cpu", balance="step")
    assert Engine(model, device="cpu", balance="step", balance_coefficient=0.1).balancer.layers


def test_a_router_is_tried_in_float32_whatever_is_the_default() -> None:
    """A proof computes in float64; ERNIE casts what its router is given."""
    small = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 48}
    torch.set_default_dtype(torch.float64)
    try:
        ernie = {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2}
        assert TransformersModel({**small, **ernie}).mixture is None
        olmoe = {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2}
        found = TransformersModel({**small, **olmoe}).mixture
        assert found is not None
        assert found.choice == RouterConfig(num_experts=4, num_experts_per_tok=2)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_layer_that_no_token_reached_has_no_load() -> None:
    """As the layers that predict further have none where their loss does not count."""
    load = ExpertLoad(
        layers=(0, 1),
        counts=torch.tensor([[2, 6], [0, 0]]),
        entropy=(0.0, 0.0),
        balance_loss=0.0,
        z_loss=0.0,
        bias=None,
    )
    assert load.highest_load == 1.5


def test_a_router_without_an_account_computes_no_shares() -> None:
    """What only counting needs is not computed in an evaluation or a generation."""
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
