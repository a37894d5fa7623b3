"""The engine's interface for trainers: statistics, heads, adapters, hooks and input checks."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import build, global_batch, tiny
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from ms_parallel import AdamWConfig, DistributedTrainer, Engine, NextTokenLoss
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.layout import AXES, Layout, row_axes
from ms_parallel.engine import assembly
from ms_parallel.engine.loss import Output
from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models.batch import Batch
from ms_parallel.optim.decays import DECAYS
from ms_parallel.optim.optimizer import learning_rate

TEMPERATURE = 2.0


@pytest.fixture(scope="module")
def groups() -> Groups:
    """Groups of a single process."""
    return connect(Layout(), device="cpu")


class WithStatistics:
    """Token losses at a temperature, with entropies and the sum of a head as statistics."""

    statistics = ("loss", "entropy", "value")

    def weight(self, batch: Batch) -> float:
        """Number of targets."""
        return float((batch["targets"] >= 0).sum())

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of the losses, and the statistics."""
        counted = batch["targets"] >= 0
        losses = output.token_losses(batch["targets"], temperature=TEMPERATURE)
        entropies = output.entropies(counted, temperature=TEMPERATURE)
        value = output.head("value").squeeze(-1) * counted
        statistics = torch.stack([losses.sum(), entropies.sum(), value.sum()])
        return losses.sum() + value.sum(), statistics.detach()


def test_a_loss_logs_statistics_of_the_whole_batch(groups: Groups) -> None:
    """Sums over all microbatches divided by the weight; heads start at zero and learn."""
    engine = build({}, groups, heads={"value": 1}, microbatch_size=3)
    batch = global_batch(0)
    model = engine.module
    assert model is not None
    with torch.no_grad():
        logits = model(batch["tokens"], positions=batch["positions"], documents=batch["documents"])
    counted = batch["targets"] >= 0
    log_p = (logits / TEMPERATURE).log_softmax(-1)[counted]
    expected = {
        "loss": float(F.nll_loss(log_p, batch["targets"][counted])),
        "entropy": float(-(log_p.exp() * log_p).sum(-1).mean()),
        "value": 0.0,
    }
    update = engine.step(batch, WithStatistics())
    # float32 sums of some fifty numbers: 1e-6 is a dozen roundings.
    assert update.statistics == pytest.approx(expected, rel=1e-6)
    assert update.loss == pytest.approx(expected["loss"], rel=1e-6)
    assert update.skipped is None
    assert engine.step(batch, WithStatistics()).statistics["value"] < 0.0


BATCH = {"tokens": torch.ones(2, 16, dtype=torch.int64)}
BATCH["targets"] = BATCH["tokens"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tokens": None, "targets": None, "input_ids": torch.ones(2, 16).long()}, "no 'tokens'"),
        ({"targets": None}, "must have 'targets', which the loss reads"),
        ({"targets": torch.ones(2, 8).long()}, "targets and tokens must have the same shape"),
        ({"targets": torch.ones(2, 16)}, "targets must be integers, not float32"),
        ({"tokens": torch.rand(2, 16)}, "tokens must be integers, not float32"),
        ({"tokens": torch.ones(2, 16, dtype=torch.bool)}, "tokens must be integers, not bool"),
        ({"tokens": torch.ones(16).long()}, "tokens must have 2 dims, not 1"),
        ({"documents": torch.zeros(2, 16)}, "documents must be integers, not float32"),
        ({"positions": torch.zeros(16).long()}, "positions and tokens must have the same shape"),
        ({"weights": torch.ones(2)}, "weights and tokens must have the same shape"),
        ({"advantages": torch.ones(3)}, "advantages must have the 2 rows of tokens"),
        ({"advantages": 1.0}, "advantages must have the 2 rows of tokens"),
        ({"tokens": [[1, 2], [3]]}, "'tokens' as list, which is not an array of numbers"),
        ({"tokens": "a text"}, "'tokens' as str, which is not an array of numbers"),
    ],
)
def test_an_invalid_batch_is_refused_in_one_line(
    groups: Groups, change: dict[str, Any], problem: str
) -> None:
    """It describes a valid batch, and the keys, shapes and dtypes of this one."""
    engine = build({}, groups)
    batch = {name: value for name, value in {**BATCH, **change}.items() if value is not None}
    with pytest.raises(ModelError) as refused:
        engine.step(batch, NextTokenLoss())
    message = str(refused.value)
    assert problem in message
    assert "a batch has tokens (B, S) int64" in message
    assert "\n" not in message
    if "'tokens' as" not in message:
        for name, value in batch.items():
            shape = tuple(torch.as_tensor(value).shape)
            assert f"{name} {shape} {str(torch.as_tensor(value).dtype)[6:]}" in message
    assert engine.step_count == 0
    if "targets" in batch:  # a function of the logits does not need targets
        with pytest.raises(ModelError, match="a batch has tokens"):
            engine.evaluate(batch, lambda output, _: output.logits())


def test_a_missing_batch_key_is_named(groups: Groups) -> None:
    """A KeyError of another mapping is not converted, because it is a bug in the function."""
    engine = build({}, groups)
    with pytest.raises(ModelError, match="must have 'rewards', which the loss reads"):
        engine.evaluate(BATCH, lambda _, batch: batch["rewards"])
    other: dict[str, Tensor] = {}
    with pytest.raises(KeyError, match="tokens"):
        engine.evaluate(BATCH, lambda *_: other["tokens"])


def test_tokens_may_be_integers_of_any_width(groups: Groups) -> None:
    """Data loaders often return uint16 or int32 arrays."""
    engine = build({}, groups)
    expected = engine.evaluate(BATCH, lambda output, _: output.logits())
    for dtype in (torch.uint16, torch.int32, torch.uint8):
        narrow = {"tokens": BATCH["tokens"].to(dtype)}
        assert torch.equal(engine.evaluate(narrow, lambda output, _: output.logits()), expected)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("a text", "prompts must be a list of prompts"),
        (["a text"], "prompt 0 must be a list of token ids.*str 'a text'"),
        ([1, 2], "prompt 0 must be a list of token ids"),
        ([[1], [0.5]], r"prompt 1 must be .*a tensor \(1,\) float32"),
        ([[[1]]], r"prompt 0 must be .*a tensor \(1, 1\) int64"),
    ],
)
def test_prompts_that_are_not_lists_of_token_ids_are_refused(
    groups: Groups, prompts: Any, message: str
) -> None:
    """In particular texts, which must be encoded first."""
    with pytest.raises(ModelError, match=message):
        build({}, groups).generate(prompts, max_new_tokens=1)


def test_prompts_may_be_a_tensor(groups: Groups) -> None:
    """Its rows are the prompts."""
    engine = build({}, groups)
    lists = engine.generate([[1, 2], [3, 4]], max_new_tokens=3, temperature=0.0)
    assert engine.generate(torch.tensor([[1, 2], [3, 4]]), max_new_tokens=3, temperature=0.0) == (
        lists
    )
    with pytest.raises(ConfigError, match="max_new_tokens must be a whole number"):
        engine.generate([[1]], max_new_tokens=1.5)  # type: ignore[arg-type]


def test_a_missing_head_is_named(groups: Groups) -> None:
    """The message shows how to build an engine with it."""
    with pytest.raises(ModelError, match=r"no head 'value'; build it with heads=\{'value': 1\}"):
        build({}, groups).evaluate(global_batch(0), lambda output, _: output.head("value"))


def test_an_update_without_targets_is_skipped_and_has_nan_metrics(groups: Groups) -> None:
    """They are NaN, as a loss of 0 would look perfect."""
    batch = global_batch(0)
    batch["targets"].fill_(-100)
    update = build({}, groups, heads={"value": 1}).step(batch, WithStatistics())
    assert update.skipped == "no_targets"
    numbers = [update.loss, update.grad_norm, *update.statistics.values()]
    assert all(number != number for number in numbers)


def test_hooks_on_torch_optimizers_see_each_update(groups: Groups) -> None:
    """Profilers detect steps with them, skipped ones included, but not steps without targets."""
    optimizers: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: optimizers.append(optimizer))
    try:
        engine = build({}, groups)
        engine.step(global_batch(0), NextTokenLoss())
        engine.step({**global_batch(1), "weights": torch.full((4, 16), 1e38)}, NextTokenLoss())
        empty = global_batch(2)
        empty["targets"].fill_(-100)
        engine.step(empty, NextTokenLoss())
    finally:
        handle.remove()
    assert optimizers == [engine.optimizer] * 2
    (stage,) = engine.stages.values()
    param_ids = {id(parameter) for parameter in engine.optimizer.param_groups[0]["params"]}
    assert param_ids == {id(parameter) for parameter in stage.parameters()}


class Shift(nn.Module):
    """A norm and a vector added to its output."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.vector = nn.Parameter(torch.zeros_like(base.weight))

    @property
    def weight(self) -> Tensor:
        """Weight of the norm."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        """(..., H) to (..., H)."""
        return self.base(x) + self.vector


class Shifts:
    """Adapters that satisfy the engine's protocol."""

    def __init__(self, stages: Any) -> None:
        for stage in stages.values():
            stage.requires_grad_(False)
            stage.model.norm = Shift(stage.model.norm)

    def disable_adapter(self) -> Any:
        """No-op."""
        return nullcontext()

    def save_pretrained(self, folder: Path) -> None:
        """No-op."""


def test_only_adapters_are_trained(groups: Groups) -> None:
    """The base weights keep their bits, and the state has only trained parameters."""
    engine = build({}, groups)
    before = {name: value.clone() for name, value in engine.parameters.items()}
    engine.adapt(Shifts)
    assert isinstance(engine.adapters, Shifts)
    assert list(engine.parameters) == ["model.norm.vector"]
    losses = [engine.step(global_batch(0), NextTokenLoss()).loss for _ in range(3)]
    assert losses[2] < losses[0]
    (stage,) = engine.stages.values()
    after = {name.replace("norm.base", "norm"): value for name, value in stage.named_parameters()}
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert {"model.norm.vector", "engine.step"} <= engine.state_dict().keys()


def test_limits_are_those_of_the_model(groups: Groups) -> None:
    """Vocabulary size and context length; None for families without a limit."""
    engine = build({}, groups)
    assert (engine.vocabulary_size, engine.context) == (48, 4096)
    assert Engine(tiny(model_type="transformer-xl"), groups=groups).context is None
    assert (engine.data_rank, engine.data_ranks) == (0, 1)


def test_unset_weights_are_not_initialized(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights="unset", training continues like the engine that was saved."""
    first = build({}, groups)
    first.step(global_batch(0), NextTokenLoss())
    state = {name: value.clone() for name, value in first.state_dict().items()}
    monkeypatch.setattr(assembly, "initialize", None)  # a call would raise
    second = build({}, groups, weights="unset")
    second.load_state_dict(state)
    updates = [engine.step(global_batch(1), NextTokenLoss()) for engine in (first, second)]
    assert updates[0] == updates[1]


def test_creating_a_trainer_does_not_change_the_process() -> None:
    """The excepthook is installed only when training starts."""
    hook = sys.excepthook
    DistributedTrainer("llama", {"data": 1}, sequence_length=8)
    assert sys.excepthook is hook


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": 1.5}, "warmup_steps must be an integer"),
        ({"decay_steps": True}, "decay_steps must be an integer"),
        ({"betas": 3}, "betas must be two numbers .*, got 3"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"decay": "cosin"}, "decay is 'cosin'; did you mean 'cosine'"),
        ({"learning_rate": float("nan")}, "learning_rate must be a number of at least 0, got nan"),
    ],
)
def test_invalid_optimizer_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    """The one-line error gives the remedy."""
    with pytest.raises(ConfigError, match=message):
        AdamWConfig(**settings)


def test_every_decay_goes_from_the_peak_to_the_floor() -> None:
    """Decays are registered by their file in `decays/`; none ever rises."""
    assert set(DECAYS) == {"cosine", "linear", "wsd"}
    for name in DECAYS:
        config = AdamWConfig(learning_rate=1.0, decay=name, decay_steps=20, final_ratio=0.25)
        rates = [learning_rate(step, config) for step in range(25)]
        assert rates[0] == pytest.approx(1.0)
        assert rates[20:] == pytest.approx([0.25] * 5)
        assert rates == sorted(rates, reverse=True)
    config = AdamWConfig(learning_rate=1.0, decay="linear", decay_steps=20, final_ratio=0.0)
    assert learning_rate(5, config) == pytest.approx(0.75)


def test_mesh_axes_are_fields_of_a_layout() -> None:
    """The mesh and each rank's place derive from them."""
    assert AXES == ("pipeline", "data", "context", "tensor")
    assert row_axes() == ("data",)
    place = Layout(data=3, tensor=2).place(3)
    assert (place.data, place.tensor, place.pipeline) == (1, 1, 0)
    assert (place.rank, place.count) == (1, 3)
