"""Optimizers and rates beside torch's own, and under layouts beside one process."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import write_corpus, write_run
from optimizer_runs import RATE, advance, planted
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
from ms_parallel.engine.optimizer import (
    declared_optimizers,
    learning_rate,
    optimizer_of,
    optimizers,
)
from ms_parallel.operators import losses
from ms_parallel.split.owners import assign_owners

RUNS = Path(__file__).parent / "optimizer_runs.py"
LAYOUT_RUNS = RUNS.with_name("runs.py")
STEPS = 20


@pytest.fixture(scope="module")
def groups() -> Groups:
    """A group of this process alone."""
    return connect(Layout(), device="cpu")


def test_wsd_stays_and_then_falls_over_the_last_share() -> None:
    """The highest rate up to the last share of updates, then a line or 1 - sqrt(t) to the floor."""
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
def test_a_decay_that_cannot_be_used_is_named(value: Any, message: str) -> None:
    """One line, with what would do."""
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
def test_an_optimizer_that_cannot_be_used_is_named(value: Any, message: str) -> None:
    """One line, with what would do; the trainer says the same."""
    for build_it in (optimizer_of, lambda one: DistributedTrainer("llama", optimizer=one)):
        with pytest.raises(ConfigError, match=message) as caught:
            build_it(value)
        assert "\n" not in str(caught.value)


def test_declared_optimizers_are_those_that_can_be_built() -> None:
    """Names and settings read from sources are those of the classes."""
    declared = declared_optimizers()
    assert declared.keys() == optimizers().keys()
    for name, keys in declared.items():
        assert keys is None or set(keys) == set(optimizers()[name].keys), name
    assert sum(keys is not None for keys in declared.values()) >= 4


def test_names_are_known_in_any_case_and_with_hyphens() -> None:
    """As architectures are; a class of torch's too. What it does not have is refused."""
    assert isinstance(optimizer_of("mu-ON"), MuonConfig)
    assert isinstance(optimizer_of("n_adam"), TorchConfig)
    assert DistributedTrainer("llama", optimizer="Muon").options.optimizer == "Muon"
    with pytest.raises(
        ConfigError, match="optimizer 'SGD' does not have the setting betas; remove it"
    ):
        DistributedTrainer("llama", optimizer="sgd", betas=(0.8, 0.9))


def torchs_own(engine: Engine, make: Any, weight_decay: float, steps: int) -> dict[str, Tensor]:
    """The engine's weights after `steps` of an optimizer of torch's on planted gradients."""
    found = {n: p.detach().clone() for n, p in engine.parameters.items()}
    optimizers = make(found)
    for step in range(steps):
        for name, weight in found.items():
            weight.grad = planted(name, step, tuple(weight.shape))
            if weight.dim() > 1:
                weight.mul_(1.0 - RATE * weight_decay)
        for optimizer in optimizers:
            optimizer.step()
    return found


def check_like(engine: Engine, expected: dict[str, Tensor], steps: int) -> None:
    """The engine's weights after its own steps are the expected."""
    before = {name: p.detach().clone() for name, p in engine.parameters.items()}
    advance(engine, 0, steps)
    for name, parameter in engine.parameters.items():
        assert not torch.equal(parameter, before[name])
        # The order of a decay and a step, a rounding each; a float32 near 1 has 6e-8.
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
def test_an_optimizer_of_torchs_updates_as_it_does_alone(groups: Groups, name: str) -> None:
    """Twenty steps of planted gradients, the decay of weights decoupled, norms without."""
    own, theirs = TORCHS[name]
    engine = build({}, groups, optimizer={"name": name, **own})

    def make(weights: dict[str, Tensor]) -> list[Any]:
        return [getattr(torch.optim, name)(list(weights.values()), lr=RATE, **theirs)]

    check_like(engine, torchs_own(engine, make, 0.1, STEPS), STEPS)


def hidden(engine: Engine) -> list[str]:
    """The matrices of a dense model's blocks."""
    return [n for n, p in engine.parameters.items() if ".layers." in n and p.dim() == 2]


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_muon_is_torchs_muon_for_hidden_matrices_and_adamw_for_the_rest(
    groups: Groups, scale: Any
) -> None:
    """Twenty steps of planted gradients in one process, within 1e-6."""
    engine = build({}, groups, optimizer=MuonConfig(scale=scale))
    before = {name: p.detach().clone() for name, p in engine.parameters.items()}
    muon = {name: before[name].clone() for name in hidden(engine)}
    rest = {name: weight.clone() for name, weight in before.items() if name not in muon}
    matrices = [w for w in rest.values() if w.dim() > 1]
    vectors = [w for w in rest.values() if w.dim() <= 1]
    optimizers = [
        torch.optim.Muon(list(muon.values()), lr=RATE, weight_decay=0.1, adjust_lr_fn=scale),
        torch.optim.AdamW(matrices, lr=RATE, weight_decay=0.1, betas=(0.9, 0.95)),
        torch.optim.AdamW(vectors, lr=RATE, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    for step in range(STEPS):
        for name, weight in (muon | rest).items():
            weight.grad = planted(name, step, tuple(weight.shape))
        for optimizer in optimizers:
            optimizer.step()
    assert len(muon) == 21
    check_like(engine, muon | rest, STEPS)


def from_the_paper(gradients: list[Tensor], rate: float) -> Tensor:
    """Jordan et al. (2024) word for word, for one matrix that begins at zero, in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    found = torch.zeros_like(gradients[0], dtype=torch.float64)
    momentum = torch.zeros_like(found)
    for gradient in gradients:
        momentum = 0.95 * momentum + gradient
        x = gradient + 0.95 * momentum
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        rows, columns = gradient.shape
        found -= rate * max(1.0, rows / columns) ** 0.5 * x
    return found


def changes(engine: Engine, steps: int) -> dict[str, Tensor]:
    """How much each parameter changes in so many updates."""
    before = {name: p.detach().clone() for name, p in engine.parameters.items()}
    advance(engine, 0, steps)
    return {name: p.detach() - before[name] for name, p in engine.parameters.items()}


def check_matrix(change: Tensor, gradients: list[Tensor]) -> None:
    """A change is the paper's.

    bfloat16 has 8 bits, and the iteration's slope at 0 is 3.4 a time.
    """
    expected = from_the_paper(gradients, RATE)
    assert (change.double() - expected).norm() <= 0.03 * expected.norm()


def test_muon_is_the_papers(groups: Groups) -> None:
    """Tall, wide and square matrices, three steps."""
    engine = build({}, groups, optimizer=MuonConfig(scale="original", weight_decay=0.0))
    changed = changes(engine, 3)
    assert {changed[n].shape[0] > changed[n].shape[1] for n in hidden(engine)} == {True, False}
    for name in hidden(engine):
        check_matrix(
            changed[name], [planted(name, s, tuple(changed[name].shape)) for s in range(3)]
        )


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_muon_takes_experts_one_by_one_and_leaves_routers_and_biases(
    groups: Groups, family: str
) -> None:
    """(experts, 2, rows, columns) are as many matrices; a router and stacked biases are AdamW's."""
    config = MuonConfig(scale="original", weight_decay=0.0)
    engine = build(FAMILIES[family], groups, optimizer=config)
    by_muon, by_adamw = engine.optimizer.moments["momentum"], engine.optimizer.moments["exp_avg"]
    assert by_muon.keys() | by_adamw.keys() == engine.parameters.keys()
    assert not by_muon.keys() & by_adamw.keys()
    others = ("bias", "norm.weight", "gate.weight", "router.weight", "embed_tokens.weight")
    for name in by_muon:
        assert not name.endswith(others)
        assert "lm_head" not in name
    changed = changes(engine, 2)
    (name,) = [n for n in by_muon if n.endswith("1.mlp.experts.gate_up_proj.weight")]
    shape = tuple(changed[name].shape)
    assert len(shape) == 4
    slopes = [planted(name, step, shape) for step in range(2)]
    for expert in range(shape[0]):
        for half in range(2):
            of_one = [slope[expert, half] for slope in slopes]
            check_matrix(changed[name][expert, half], of_one)


def test_muon_takes_fused_projections_apart(groups: Groups) -> None:
    """Rows given for a pattern of names; their sum is checked."""
    rows = {"*.o_proj.weight": [20, 12]}
    config = MuonConfig(scale="original", weight_decay=0.0, fused=rows)
    engine = build({}, groups, optimizer=config)
    name = "model.layers.1.self_attn.o_proj.weight"
    change = changes(engine, 2)[name]
    slopes = [planted(name, step, (32, 32)) for step in range(2)]
    check_matrix(change[:20], [slope[:20] for slope in slopes])
    check_matrix(change[20:], [slope[20:] for slope in slopes])
    with pytest.raises(
        ConfigError, match=r"the row counts of model.layers.0.* in fused must sum to 32, got 33"
    ):
        build({}, groups, optimizer=MuonConfig(fused={"*.o_proj.weight": [20, 13]}))


class Fused(nn.Module):
    """A module of one's own with fused projections."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 8)
        layer = {"qkv_proj": nn.Linear(8, 16), "gate_up_proj": nn.Linear(8, 12)}
        self.layers = nn.ModuleList([nn.ModuleDict(layer)])

    def forward(self, tokens: Tensor, **_: Any) -> Tensor:
        """Logits."""
        return self.embed(tokens) @ self.embed.weight.T


def test_muon_asks_what_a_fused_projection_holds(groups: Groups) -> None:
    """Gate and up are halves; of queries, keys and values one has to say the rows."""
    plan = ModelPlan(blocks="layers.*")
    with pytest.raises(ConfigError, match=r"layers.0.qkv_proj.weight seems to be a fused weight"):
        Engine(Fused(), groups=groups, plan=plan, optimizer="muon")
    config = MuonConfig(scale="original", weight_decay=0.0, fused={"*.qkv_proj.weight": [8, 4, 4]})
    changed = changes(Engine(Fused(), groups=groups, plan=plan, optimizer=config), 2)
    for name, rows in {"qkv_proj": (8, 4, 4), "gate_up_proj": (6, 6)}.items():
        own = f"layers.0.{name}.weight"
        slopes = [planted(own, step, tuple(changed[own].shape)) for step in range(2)]
        parts = zip(changed[own].split(rows), *(slope.split(rows) for slope in slopes), strict=True)
        for change, *of_one in parts:
            check_matrix(change, of_one)
    with pytest.raises(ConfigError, match="needs a plan that names them; pass plan="):
        Engine(Fused(), groups=groups, optimizer="muon")


def test_groups_have_settings_of_their_own(groups: Groups) -> None:
    """By the first pattern that fits: another rate, a decay of vectors, other momentum."""
    rules = {
        "*.layers.0.*norm.weight": {"weight_decay": 0.5, "learning_rate": 0.0},
        "*.layers.0.*": {"learning_rate": 6e-4, "momentum": 0.0},
    }
    config = SGDConfig(learning_rate=3e-4, groups=rules, weight_decay=0.0)
    changed = changes(build({}, groups, optimizer=config), 2)
    for name, change in changed.items():
        first, second = (planted(name, step, tuple(change.shape)) for step in range(2))
        expected = -RATE * (first + (0.9 * first + second))
        if ".layers.0." in name:
            expected = torch.zeros_like(change) if "norm" in name else -2 * RATE * (first + second)
        torch.testing.assert_close(change, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer", [{"name": "Muon"}, {"name": "SGD", "nesterov": True}, {"name": "Adafactor"}]
)
def test_a_model_learns_with_each_optimizer(groups: Groups, optimizer: dict[str, Any]) -> None:
    """Thirty updates of a count that can be learnt; the rate rises and falls as wsd."""
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
    """The dearest first, each to the one with the least; every process finds the same."""
    costs = {(f"w{n}", 0): float(cost) for n, cost in enumerate((9, 7, 6, 5, 4, 3, 2))}
    found = assign_owners(costs, 2)
    loads = [sum(cost for key, cost in costs.items() if found[key] == rank) for rank in (0, 1)]
    assert abs(loads[0] - loads[1]) <= min(costs.values())
    assert assign_owners(dict(reversed(costs.items())), 2) == found


MODELS = {"tied": {"tie_word_embeddings": True}, "experts": FAMILIES["qwen3_moe"]}
LAYOUTS = {
    2: {"data=2": "experts", "pipeline=2": "tied", "tensor=2": "experts", "context=2": "tied"},
    4: {"data=4": "tied", "data=2,tensor=2": "experts", "data=2,pipeline=2": "tied"},
}
"""Which model is updated where."""
GROUPED = {"name": "muon", "groups": {"*.embed_tokens.weight": {"learning_rate": 1e-4}}}
"""A tied copy goes by its owner's name, also in a stage that has the copy alone."""


def jobs(models: dict[str, str], optimizer: Any) -> list[dict[str, Any]]:
    """Twenty updates of a model under each layout."""
    shared = {"optimizer": optimizer, "steps": STEPS}
    return [{"layout": at, "settings": MODELS[name], **shared} for at, name in models.items()]


@cache
def alone() -> dict[str, dict[str, str]]:
    """The states of one process."""
    every = [{**jobs({"data=1": name}, GROUPED)[0]} for name in MODELS]
    return dict(zip(MODELS, run_processes(1, RUNS, "stepped", jobs=every)[0], strict=True))


@pytest.mark.parametrize("count", [2, 4])
def test_muon_gives_the_same_bits_under_every_layout(count: int) -> None:
    """Weights and moments after twenty updates, each gathered, are those of one process."""
    many = run_processes(count, RUNS, "stepped", jobs=jobs(LAYOUTS[count], GROUPED))
    for number, (layout, name) in enumerate(LAYOUTS[count].items()):
        expected = alone()[name]
        assert {key for of_rank in many for key in of_rank[number]} == expected.keys()
        for of_rank in many:
            assert of_rank[number].items() <= expected.items(), layout


@pytest.mark.slow
def test_muon_takes_each_process_its_share_of_the_time() -> None:
    """At data=2 the slower process works at most 0.6 of what one does, counted in its own time."""
    alone, two = (run_processes(count, RUNS, "muon_seconds", data=count) for count in (1, 2))
    assert max(two) <= 0.6 * alone[0], (alone, two)


def test_state_goes_from_layout_to_layout_with_every_optimizer(tmp_path: Path) -> None:
    """Saved under one after three updates, two more under another: the bits of five in one."""
    names = ["muon", "sgd", "adafactor", "nadam"]
    every = [{"layout": "data=1", "settings": {}, "steps": 5, "optimizer": name} for name in names]
    ((one,), *_) = (run_processes(1, RUNS, "stepped", jobs=every),)
    shared = {"optimizers": names, "settings": {}, "at": str(tmp_path)}
    two = run_processes(
        2,
        RUNS,
        "handed_on",
        saved=["data=2", "tensor=2"],
        loaded=["pipeline=2", "data=2"],
        **shared,
    )
    again = run_processes(1, RUNS, "handed_on", saved=[], loaded=["data=1"], **shared)
    seen = set()
    for of_rank in (*two, *again):
        for what, state in of_rank.items():
            seen.add(what)
            assert state.items() <= one[names.index(what.split()[0])].items(), what
    assert len(seen) == len(names) * 2 * 3


def test_parameters_that_a_class_does_not_take_are_named(groups: Groups) -> None:
    """Torch's own Muon takes matrices alone; its words stand in our one line."""
    with pytest.raises(
        ConfigError, match=r"'Muon' cannot update parameters such as model\..*only supports 2D"
    ):
        build({}, groups, optimizer=TorchConfig(kind=torch.optim.Muon))


def test_what_is_not_elementwise_is_refused_where_weights_are_split() -> None:
    """By name, in one line; it would be wrong in silence."""
    for said in run_processes(2, RUNS, "refused", layout="data=2"):
        assert said.startswith("optimizer 'Muon' is not elementwise and cannot update shards")
        assert "\n" not in said


def test_a_run_file_trains_with_muon_and_wsd_and_keeps_to_its_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table in the file; another optimizer cannot go on from there, other settings can."""
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
def test_z_loss_is_the_square_of_the_log_normalizer(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    """Losses and gradients of a head, whole or in chunks of five rows, in float64."""
    monkeypatch.setattr(losses, "_CHUNK_BYTES", chunk_bytes)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(12, 8, generator=draw, dtype=torch.float64).requires_grad_()
    weight = torch.randn(48, 8, generator=draw, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, 48, (12,), generator=draw)
    targets[3] = -100
    found = losses.linear_cross_entropy(hidden, weight, targets, reduction="none", z_loss=0.1)
    slopes = torch.autograd.grad(found.square().sum(), (hidden, weight))
    logits = hidden @ weight.T
    plain = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    expected = plain + 0.1 * logits.logsumexp(1).square() * (targets >= 0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for slope, own in zip(
        slopes, torch.autograd.grad(expected.square().sum(), (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(slope, own, rtol=1e-11, atol=1e-11)


def test_z_loss_is_the_same_under_every_layout(groups: Groups) -> None:
    """It raises loss and gradient, alike where the vocabulary, rows or layers are split."""
    layouts = ("data=1", "data=2", "tensor=2", "pipeline=2")
    every: list[dict[str, Any]] = [{"layout": at, "settings": {}} for at in layouts]
    (without,), (one,) = (
        run_processes(1, RUNS, "with_z", jobs=every[:1], coefficient=c)[0] for c in (0.0, 0.1)
    )
    assert one["loss"] > without["loss"] + 1.0
    for of_rank in run_processes(2, RUNS, "with_z", jobs=every[1:], coefficient=0.1):
        for update in of_rank:
            # As in test_layouts: float32 sums in another order.
            assert update == pytest.approx(one, rel=1e-5)


def test_a_run_with_muon_is_the_same_under_every_layout() -> None:
    """Losses of six updates by the model's own gradients, whose last bits differ.

    A gradient that differs by 1e-7 can be rounded to another bfloat16, 2^-9 away; an update of
    0.02 then moves a logit by less than 1e-4. Measured at most 3.2e-5.
    """
    optimizer = {"name": "muon", "learning_rate": 5e-3, "max_grad_norm": 1.0}
    shared = {"settings": FAMILIES["qwen3_moe"], "steps": 6, "options": {"optimizer": optimizer}}
    ((one,),) = run_processes(1, LAYOUT_RUNS, "curves", jobs=[{"layout": "data=1", **shared}])
    every = [{"layout": at, **shared} for at in ("data=2", "tensor=2", "pipeline=2")]
    for of_rank in run_processes(2, LAYOUT_RUNS, "curves", jobs=every):
        for found in of_rank:
            assert found["losses"] == pytest.approx(one["losses"], rel=1e-4)
            assert found["losses"][-1] < found["losses"][0]
