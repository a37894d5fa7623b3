"""Optimizers and learning rates, against torch's and under layouts."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import write_corpus, write_run
from optimizer_runs import RATE, advance, random_gradient
from processes import run_processes
from runs import FAMILIES, build, train
from torch import Tensor, nn

from ms_parallel import (
    ConfigError,
    DistributedTrainer,
    Engine,
    ModelPlan,
    MuonConfig,
    SGDConfig,
    TorchConfig,
)
from ms_parallel.cli import main
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.layout import Layout
from ms_parallel.operators import losses
from ms_parallel.optim.optimizer import (
    declared_optimizers,
    learning_rate,
    optimizer_of,
    optimizers,
)
from ms_parallel.split.owners import assign_owners

RUNS = Path(__file__).parent / "optimizer_runs.py"
LAYOUT_RUNS = RUNS.with_name("runs.py")
STEPS = 20


@pytest.fixture(scope="module")
def groups() -> Groups:
    """Groups of a single process."""
    return connect(Layout(), device="cpu")


def test_wsd_is_constant_and_then_decays_over_the_last_share() -> None:
    """Warmup, a constant rate, then linear or 1 - sqrt(t) decay over the last share of steps."""
    shared: dict[str, Any] = {
        "learning_rate": 1.0,
        "warmup_steps": 10,
        "decay_steps": 110,
        "final_ratio": 0.0,
    }
    line = SGDConfig(decay={"name": "WSD", "share": 0.4}, **shared)
    rates = [learning_rate(step, line) for step in range(120)]
    assert rates[4] == pytest.approx(0.5)
    assert rates[9:71] == pytest.approx([1.0] * 62)
    assert rates[90] == pytest.approx(0.5)
    assert rates[110:] == [0.0] * 10
    root = SGDConfig(decay={"name": "wsd", "share": 0.4, "shape": "sqrt"}, **shared)
    assert learning_rate(80, root) == pytest.approx(0.5)
    assert learning_rate(95, SGDConfig(decay="wsd", **shared)) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("wsdd", "decay is 'wsdd'; did you mean 'wsd'"),
        ({"name": "wsd", "share": 0}, "share must be a number of at least"),
        ({"name": "wsd", "shape": "root"}, "shape is 'root'"),
        ({"name": "wsd", "shar": 0.1}, "decay 'wsd' has unknown setting 'shar'; did you mean 'sh"),
        ({"share": 0.1}, "decay must be a name, or a table of name and settings"),
    ],
)
def test_an_invalid_decay_is_named(value: Any, message: str) -> None:
    """The one-line error gives the remedy."""
    with pytest.raises(ConfigError, match=message):
        SGDConfig(decay=value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("muom", "optimizer is 'muom'; did you mean 'Muon'"),
        ({"name": "Muon", "momentun": 0.9}, "unknown setting 'momentun'; did you mean 'momentum'"),
        ({"name": "SGD", "momentum": 0, "nesterov": True}, "nesterov=true needs momentum above 0"),
        ({"name": "Muon", "scale": "adam"}, "scale is 'adam'"),
        (
            {"name": "Muon", "fused": {"*.qkv": [0]}},
            "fused must map name patterns to the rows of each matrix",
        ),
        ({"name": "NAdam", "betas": [2, 3]}, "'NAdam' cannot be used: Invalid beta parameter"),
        ("LBFGS", "'LBFGS' cannot be used"),
        ({"name": "SGD", "groups": {"*": {"rate": 1}}}, "group '\\*' has unknown setting 'rate'"),
        (
            {"name": "SGD", "groups": {"*": {"momentum": 2}}},
            "group '\\*': momentum must be a number of at least 0 and less than 1, got 2",
        ),
        (3, "optimizer must be a name, or a table of name and settings .*, got 3"),
    ],
)
def test_an_invalid_optimizer_is_named(value: Any, message: str) -> None:
    """The one-line error gives the remedy, also from the trainer."""
    for construct in (
        optimizer_of,
        lambda optimizer: DistributedTrainer("llama", optimizer=optimizer),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            construct(value)
        assert "\n" not in str(caught.value)


def test_declared_optimizers_equal_the_registered_ones() -> None:
    """Names and settings parsed from the sources equal the classes'."""
    declared = declared_optimizers()
    assert declared.keys() == optimizers().keys()
    for name, keys in declared.items():
        assert keys is None or set(keys) == set(optimizers()[name].keys), name
    assert sum(keys is not None for keys in declared.values()) >= 4


def test_optimizer_names_ignore_case_and_hyphens() -> None:
    """Including classes of torch; settings that an optimizer lacks are refused."""
    assert isinstance(optimizer_of("mu-ON"), MuonConfig)
    assert isinstance(optimizer_of("n_adam"), TorchConfig)
    assert DistributedTrainer("llama", optimizer="Muon").options.optimizer == "Muon"
    with pytest.raises(
        ConfigError, match="optimizer 'SGD' does not have the setting betas; remove it"
    ):
        DistributedTrainer("llama", optimizer="sgd", betas=(0.8, 0.9))


def torch_weights(engine: Engine, make: Any, weight_decay: float, steps: int) -> dict[str, Tensor]:
    """Weights of the engine after `steps` updates by torch optimizers with planted gradients."""
    weights = {n: p.detach().clone() for n, p in engine.parameters.items()}
    torch_optimizers = make(weights)
    for step in range(steps):
        for name, weight in weights.items():
            weight.grad = random_gradient(name, step, tuple(weight.shape))
            if weight.dim() > 1:
                weight.mul_(1.0 - RATE * weight_decay)
        for optimizer in torch_optimizers:
            optimizer.step()
    return weights


def check_updates(engine: Engine, expected: dict[str, Tensor], steps: int) -> None:
    """Step the engine and compare its weights with the expected ones."""
    before = {name: p.detach().clone() for name, p in engine.parameters.items()}
    advance(engine, 0, steps)
    for name, parameter in engine.parameters.items():
        assert not torch.equal(parameter, before[name])
        # Decay and step are applied in a different order; float32 near 1 rounds by 6e-8.
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=1e-6)


TORCHS: dict[str, Any] = {
    "SGD": ({"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "nesterov": True}),
    "Adafactor": ({}, {}),
    "NAdam": ({"momentum_decay": 0.01}, {"momentum_decay": 0.01}),
    "RMSprop": ({}, {}),
    "Adagrad": ({}, {}),
    "Rprop": ({}, {}),
}


@pytest.mark.parametrize("name", list(TORCHS))
def test_torch_optimizers_update_as_in_plain_torch(groups: Groups, name: str) -> None:
    """Twenty steps of planted gradients with decoupled weight decay on all but norms."""
    settings, torch_settings = TORCHS[name]
    engine = build({}, groups, optimizer={"name": name, **settings})

    def make(weights: dict[str, Tensor]) -> list[Any]:
        return [getattr(torch.optim, name)(list(weights.values()), lr=RATE, **torch_settings)]

    check_updates(engine, torch_weights(engine, make, 0.1, STEPS), STEPS)


def hidden_matrices(engine: Engine) -> list[str]:
    """Names of the matrices in the blocks of a dense model."""
    return [n for n, p in engine.parameters.items() if ".layers." in n and p.dim() == 2]


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_muon_equals_torchs_for_hidden_matrices_and_adamw_for_other_weights(
    groups: Groups, scale: Any
) -> None:
    """Twenty steps of planted gradients in one process, within 1e-6."""
    engine = build({}, groups, optimizer=MuonConfig(scale=scale))
    before = {name: p.detach().clone() for name, p in engine.parameters.items()}
    muon = {name: before[name].clone() for name in hidden_matrices(engine)}
    others = {name: weight.clone() for name, weight in before.items() if name not in muon}
    matrices = [w for w in others.values() if w.dim() > 1]
    vectors = [w for w in others.values() if w.dim() <= 1]
    optimizers = [
        torch.optim.Muon(list(muon.values()), lr=RATE, weight_decay=0.1, adjust_lr_fn=scale),
        torch.optim.AdamW(matrices, lr=RATE, weight_decay=0.1, betas=(0.9, 0.95)),
        torch.optim.AdamW(vectors, lr=RATE, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    for step in range(STEPS):
        for name, weight in (muon | others).items():
            weight.grad = random_gradient(name, step, tuple(weight.shape))
        for optimizer in optimizers:
            optimizer.step()
    assert len(muon) == 21
    check_updates(engine, muon | others, STEPS)


def muon_change(gradients: list[Tensor], rate: float) -> Tensor:
    """Change of a matrix by Muon as in Jordan et al. (2024), in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    change = torch.zeros_like(gradients[0], dtype=torch.float64)
    momentum = torch.zeros_like(change)
    for gradient in gradients:
        momentum = 0.95 * momentum + gradient
        x = gradient + 0.95 * momentum
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        rows, columns = gradient.shape
        change -= rate * max(1.0, rows / columns) ** 0.5 * x
    return change


def changes(engine: Engine, steps: int) -> dict[str, Tensor]:
    """Change of each parameter over `steps` updates."""
    before = {name: p.detach().clone() for name, p in engine.parameters.items()}
    advance(engine, 0, steps)
    return {name: p.detach() - before[name] for name, p in engine.parameters.items()}


def check_matrix(change: Tensor, gradients: list[Tensor]) -> None:
    """Compare a change with the paper's.

    bfloat16 has 8 bits, and each iteration has slope 3.4 at 0.
    """
    expected = muon_change(gradients, RATE)
    assert (change.double() - expected).norm() <= 0.03 * expected.norm()


def test_muon_equals_the_paper(groups: Groups) -> None:
    """Tall, wide and square matrices, three steps."""
    engine = build({}, groups, optimizer=MuonConfig(scale="original", weight_decay=0.0))
    changed = changes(engine, 3)
    assert {changed[n].shape[0] > changed[n].shape[1] for n in hidden_matrices(engine)} == {
        True,
        False,
    }
    for name in hidden_matrices(engine):
        check_matrix(
            changed[name], [random_gradient(name, s, tuple(changed[name].shape)) for s in range(3)]
        )


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_muon_updates_experts_separately_and_leaves_routers_and_biases_to_adamw(
    groups: Groups, family: str
) -> None:
    """Weights of shape (experts, 2, rows, columns) are separate matrices."""
    config = MuonConfig(scale="original", weight_decay=0.0)
    engine = build(FAMILIES[family], groups, optimizer=config)
    by_muon, by_adamw = engine.optimizer.moments["momentum"], engine.optimizer.moments["exp_avg"]
    assert by_muon.keys() | by_adamw.keys() == engine.parameters.keys()
    assert not by_muon.keys() & by_adamw.keys()
    adamw_suffixes = ("bias", "norm.weight", "gate.weight", "router.weight", "embed_tokens.weight")
    for name in by_muon:
        assert not name.endswith(adamw_suffixes)
        assert "lm_head" not in name
    changed = changes(engine, 2)
    (name,) = [n for n in by_muon if n.endswith("1.mlp.experts.gate_up_proj.weight")]
    shape = tuple(changed[name].shape)
    assert len(shape) == 4
    grads = [random_gradient(name, step, shape) for step in range(2)]
    for expert in range(shape[0]):
        for half in range(2):
            matrix_grads = [grad[expert, half] for grad in grads]
            check_matrix(changed[name][expert, half], matrix_grads)


def test_muon_splits_fused_projections(groups: Groups) -> None:
    """Row counts are set per name pattern, and their sum is checked."""
    rows = {"*.o_proj.weight": [20, 12]}
    config = MuonConfig(scale="original", weight_decay=0.0, fused=rows)
    engine = build({}, groups, optimizer=config)
    name = "model.layers.1.self_attn.o_proj.weight"
    change = changes(engine, 2)[name]
    grads = [random_gradient(name, step, (32, 32)) for step in range(2)]
    check_matrix(change[:20], [grad[:20] for grad in grads])
    check_matrix(change[20:], [grad[20:] for grad in grads])
    with pytest.raises(
        ConfigError, match=r"the row counts of model.layers.0.* in fused must sum to 32, got 33"
    ):
        build({}, groups, optimizer=MuonConfig(fused={"*.o_proj.weight": [20, 13]}))


class Fused(nn.Module):
    """A custom module with fused projections."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 8)
        layer = {"qkv_proj": nn.Linear(8, 16), "gate_up_proj": nn.Linear(8, 12)}
        self.layers = nn.ModuleList([nn.ModuleDict(layer)])

    def forward(self, tokens: Tensor, **_: Any) -> Tensor:
        """Logits."""
        return self.embed(tokens) @ self.embed.weight.T


def test_muon_needs_the_rows_of_fused_projections(groups: Groups) -> None:
    """Gate and up are halves; the rows of q, k and v have to be given."""
    plan = ModelPlan(blocks="layers.*")
    with pytest.raises(ConfigError, match=r"layers.0.qkv_proj.weight seems to be a fused weight"):
        Engine(Fused(), groups=groups, plan=plan, optimizer="muon")
    config = MuonConfig(scale="original", weight_decay=0.0, fused={"*.qkv_proj.weight": [8, 4, 4]})
    changed = changes(Engine(Fused(), groups=groups, plan=plan, optimizer=config), 2)
    for name, rows in {"qkv_proj": (8, 4, 4), "gate_up_proj": (6, 6)}.items():
        weight_name = f"layers.0.{name}.weight"
        grads = [
            random_gradient(weight_name, step, tuple(changed[weight_name].shape))
            for step in range(2)
        ]
        parts = zip(
            changed[weight_name].split(rows), *(grad.split(rows) for grad in grads), strict=True
        )
        for change, *matrix_grads in parts:
            check_matrix(change, matrix_grads)
    with pytest.raises(ConfigError, match="needs a plan that names them; pass plan="):
        Engine(Fused(), groups=groups, optimizer="muon")


def test_parameter_groups_override_settings(groups: Groups) -> None:
    """The first matching pattern sets learning rate, weight decay and momentum."""
    rules = {
        "*.layers.0.*norm.weight": {"weight_decay": 0.5, "learning_rate": 0.0},
        "*.layers.0.*": {"learning_rate": 6e-4, "momentum": 0.0},
    }
    config = SGDConfig(learning_rate=3e-4, groups=rules, weight_decay=0.0)
    changed = changes(build({}, groups, optimizer=config), 2)
    for name, change in changed.items():
        first, second = (random_gradient(name, step, tuple(change.shape)) for step in range(2))
        expected = -RATE * (first + (0.9 * first + second))
        if ".layers.0." in name:
            expected = torch.zeros_like(change) if "norm" in name else -2 * RATE * (first + second)
        torch.testing.assert_close(change, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer", [{"name": "Muon"}, {"name": "SGD", "nesterov": True}, {"name": "Adafactor"}]
)
def test_a_model_learns_with_each_optimizer(groups: Groups, optimizer: dict[str, Any]) -> None:
    """Thirty updates on counting sequences, with a WSD learning rate."""
    rates = {"Muon": 5e-3, "SGD": 0.1, "Adafactor": 0.03}
    config = optimizer_of(
        optimizer,
        learning_rate=rates[optimizer["name"]],
        warmup_steps=3,
        decay="wsd",
        decay_steps=30,
    )
    losses, _ = train(build({}, groups, optimizer=config), 30)
    assert losses[-1] < 0.8 * losses[0]


def test_owners_share_the_work_evenly() -> None:
    """Most expensive first, each to the least loaded rank; every process finds the same."""
    costs = {(f"w{n}", 0): float(cost) for n, cost in enumerate((9, 7, 6, 5, 4, 3, 2))}
    owners = assign_owners(costs, 2)
    loads = [sum(cost for key, cost in costs.items() if owners[key] == rank) for rank in (0, 1)]
    assert abs(loads[0] - loads[1]) <= min(costs.values())
    assert assign_owners(dict(reversed(costs.items())), 2) == owners


MODELS = {"tied": {"tie_word_embeddings": True}, "experts": FAMILIES["qwen3_moe"]}
LAYOUTS = {
    2: {"data=2": "experts", "pipeline=2": "tied", "tensor=2": "experts", "context=2": "tied"},
    4: {"data=4": "tied", "data=2,tensor=2": "experts", "data=2,pipeline=2": "tied"},
}
"""Models by number of processes and layout."""
GROUPED = {"name": "muon", "groups": {"*.embed_tokens.weight": {"learning_rate": 1e-4}}}
"""A pattern matches a tied copy by its owner's name, also in a stage without the owner."""


def jobs(models: dict[str, str], optimizer: Any) -> list[dict[str, Any]]:
    """Twenty updates of a model under each layout."""
    shared = {"optimizer": optimizer, "steps": STEPS}
    return [
        {"layout": layout, "settings": MODELS[name], **shared} for layout, name in models.items()
    ]


@cache
def single_process_states() -> dict[str, dict[str, str]]:
    """Final states of one process, by model."""
    all_jobs = [{**jobs({"data=1": name}, GROUPED)[0]} for name in MODELS]
    return dict(zip(MODELS, run_processes(1, RUNS, "run_updates", jobs=all_jobs)[0], strict=True))


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_muon_gives_the_same_bits_under_every_layout(count: int) -> None:
    """Gathered weights and moments after twenty updates equal one process's."""
    ranks = run_processes(count, RUNS, "run_updates", jobs=jobs(LAYOUTS[count], GROUPED))
    for index, (layout, name) in enumerate(LAYOUTS[count].items()):
        expected = single_process_states()[name]
        assert {key for states in ranks for key in states[index]} == expected.keys()
        for states in ranks:
            assert states[index].items() <= expected.items(), layout


@pytest.mark.slow
def test_muon_splits_its_work_between_processes() -> None:
    """At data=2 the slower process needs at most 0.6 of the CPU time of a single one."""
    single, double = (run_processes(count, RUNS, "muon_seconds", data=count) for count in (1, 2))
    assert max(double) <= 0.6 * single[0], (single, double)


def test_optimizer_state_moves_between_layouts(tmp_path: Path) -> None:
    """Three updates, a save, a load under another layout and two updates give the bits of five."""
    names = ["muon", "sgd", "adafactor", "nadam"]
    all_jobs = [
        {"layout": "data=1", "settings": {}, "steps": 5, "optimizer": name} for name in names
    ]
    ((expected,), *_) = (run_processes(1, RUNS, "run_updates", jobs=all_jobs),)
    shared = {"optimizers": names, "settings": {}, "root": str(tmp_path)}
    two_ranks = run_processes(
        2,
        RUNS,
        "save_and_resume",
        saved=["data=2", "tensor=2"],
        loaded=["pipeline=2", "data=2"],
        **shared,
    )
    one_rank = run_processes(1, RUNS, "save_and_resume", saved=[], loaded=["data=1"], **shared)
    seen = set()
    for results in (*two_ranks, *one_rank):
        for transfer, state in results.items():
            seen.add(transfer)
            assert state.items() <= expected[names.index(transfer.split()[0])].items(), transfer
    assert len(seen) == len(names) * 2 * 3


def test_parameters_that_a_torch_optimizer_rejects_are_named(groups: Groups) -> None:
    """Muon of torch accepts only matrices; our one-line error quotes it."""
    with pytest.raises(
        ConfigError, match=r"'Muon' cannot update parameters such as model\..*only supports 2D"
    ):
        build({}, groups, optimizer=TorchConfig(kind=torch.optim.Muon))


def test_an_optimizer_that_is_not_elementwise_is_refused_for_sharded_weights() -> None:
    """The one-line error names the optimizer; the result would be wrong silently."""
    for message in run_processes(2, RUNS, "refusal", layout="data=2"):
        assert message.startswith("optimizer 'Muon' is not elementwise and cannot update shards")
        assert "\n" not in message


def test_a_run_file_trains_with_muon_and_wsd_and_cannot_switch_optimizers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run may change other settings, but not the optimizer."""
    run = write_run(tmp_path / "run.toml", write_corpus(tmp_path / "corpus"), steps=2)
    table = ["--set", "optimizer.name=muon", "--set", "optimizer.momentum=0.9"]
    wsd = ["--set", "learning_rate_decay.name=wsd", "--set", "learning_rate_decay.share=0.5"]
    assert main(["train", str(run), *table, *wsd]) == 0
    capsys.readouterr()
    assert main(["train", str(run), "--set", "optimizer=adamw", "--set", "steps=3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert 'optimizer is "AdamW", was "Muon"' in line
    assert main(["train", str(run), *table[:2], *wsd, "--set", "steps=3"]) == 0


@pytest.mark.parametrize("chunk_bytes", [1 << 28, 4 * 48 * 5])
def test_z_loss_equals_the_squared_log_normalizer(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    """Losses and gradients in float64, in one chunk and in chunks of five rows."""
    monkeypatch.setattr(losses, "_CHUNK_BYTES", chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(12, 8, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(48, 8, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, 48, (12,), generator=generator)
    targets[3] = -100
    actual = losses.linear_cross_entropy(hidden, weight, targets, reduction="none", z_loss=0.1)
    grads = torch.autograd.grad(actual.square().sum(), (hidden, weight))
    logits = hidden @ weight.T
    plain = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    expected = plain + 0.1 * logits.logsumexp(1).square() * (targets >= 0)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for grad, expected_grad in zip(
        grads, torch.autograd.grad(expected.square().sum(), (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-11, atol=1e-11)


def test_z_loss_is_the_same_under_every_layout(groups: Groups) -> None:
    """It raises loss and gradient norm equally with a split vocabulary, batch or model."""
    layouts = ("data=1", "data=2", "tensor=2", "pipeline=2")
    all_jobs: list[dict[str, Any]] = [{"layout": layout, "settings": {}} for layout in layouts]
    (without,), (expected,) = (
        run_processes(1, RUNS, "z_loss_updates", jobs=all_jobs[:1], coefficient=coefficient)[0]
        for coefficient in (0.0, 0.1)
    )
    assert expected["loss"] > without["loss"] + 1.0
    for updates in run_processes(2, RUNS, "z_loss_updates", jobs=all_jobs[1:], coefficient=0.1):
        for update in updates:
            # As in test_layouts: float32 sums in a different order.
            assert update == pytest.approx(expected, rel=1e-5)


def test_a_run_with_muon_is_the_same_under_every_layout() -> None:
    """Losses of six updates with real gradients, which differ in their last bits.

    A gradient that differs by 1e-7 can be rounded to another bfloat16, 2^-9 away; an update of 0.02
    then moves a logit by less than 1e-4. The largest difference measured is 3.2e-5.
    """
    optimizer = {"name": "muon", "learning_rate": 5e-3, "max_grad_norm": 1.0}
    shared = {"settings": FAMILIES["qwen3_moe"], "steps": 6, "options": {"optimizer": optimizer}}
    ((expected,),) = run_processes(1, LAYOUT_RUNS, "curves", jobs=[{"layout": "data=1", **shared}])
    all_jobs = [{"layout": layout, **shared} for layout in ("data=2", "tensor=2", "pipeline=2")]
    for results in run_processes(2, LAYOUT_RUNS, "curves", jobs=all_jobs):
        for result in results:
            assert result["losses"] == pytest.approx(expected["losses"], rel=1e-4)
            assert result["losses"][-1] < result["losses"][0]
