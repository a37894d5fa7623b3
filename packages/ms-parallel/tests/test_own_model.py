"""A module of the user's own enters the engine as it is, and trains as it would by hand."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from own_models import PLAN, Mine, refusals
from processes import run_processes
from runs import VOCABULARY, global_batch
from torch import Tensor, nn

from ms_parallel import (
    AdamWConfig,
    ConfigError,
    Engine,
    Layout,
    ModelError,
    ModelPlan,
    NextTokenLoss,
)
from ms_parallel.split.own_model import LanguageModel, check_stages

CHILD = Path(__file__).with_name("own_models.py")
STEPS, FEW = 6, 3
accepted: LanguageModel = Mine()


def by_hand() -> list[float]:
    """The same training in plain torch."""
    torch.set_num_threads(1)
    model = Mine()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    config = AdamWConfig(learning_rate=5e-3, warmup_steps=2, decay_steps=20)
    adam = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps)
    losses = []
    for step in range(STEPS):
        from ms_parallel.engine.optimizer import learning_rate

        batch = global_batch(step)
        logits = model(batch["tokens"], documents=batch["documents"])
        each = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["targets"].flatten(), reduction="none"
        )
        weights = (batch["weights"] * (batch["targets"] >= 0)).flatten()
        loss = (each * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or 1e9)
        for group in adam.param_groups:
            group["lr"] = learning_rate(step, config)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


def test_every_way_to_run_it_gives_the_losses_of_plain_torch(tmp_path: Path) -> None:
    """In one process, over data or tensor ranks, by microbatches, recomputed, gone on with."""
    expected = by_hand()
    assert expected[-1] < expected[0]
    one: list[dict[str, Any]] = [
        {"layout": "", "steps": STEPS},
        {"layout": "", "steps": STEPS, "plan": True, "recompute": "full", "microbatch_size": 1},
    ]
    two: list[dict[str, Any]] = [
        {"layout": "data=2", "steps": STEPS},
        {"layout": "data=2", "steps": FEW, "plan": True, "microbatch_size": 1},
        {"layout": "data=2", "steps": STEPS, "keep": 3, "folder": str(tmp_path / "kept")},
        {"layout": "tensor=2", "steps": STEPS, "plan": True, "microbatch_size": 2},
        {"layout": "pipeline=2", "steps": FEW, "plan": True, "microbatch_size": 1},
    ]
    four: list[dict[str, Any]] = [
        {"layout": f"{axis}=2,pipeline=2", "steps": FEW, "plan": True, "microbatch_size": 1}
        for axis in ("data", "tensor")
    ]
    ran = [
        *run_processes(1, CHILD, "curve", jobs=one),
        *run_processes(2, CHILD, "curve", jobs=two),
        *run_processes(4, CHILD, "curve", jobs=four),
    ]
    for result in ran:
        for job in result:
            # Sums over rows in another order, in float32, for six steps.
            assert job["losses"] == pytest.approx(expected[: len(job["losses"])], rel=1e-5)
    assert ran[1][0]["sum"] + ran[2][0]["sum"] == pytest.approx(ran[0][0]["sum"], abs=1e-3)


def test_what_cannot_be_split_says_so() -> None:
    """Stages cannot be cut out of a module, and the tensor axis needs a plan."""
    pipeline, tensor = refusals(["pipeline=2", "tensor=2"])
    assert "pipeline=2 cannot cut Mine" in pipeline
    assert "tensor=2 cannot split Mine without a plan" in tensor
    with pytest.raises(ConfigError, match="recompute='full' needs to know the blocks of Mine"):
        Engine(Mine(), device="cpu", recompute="full")
    with pytest.raises(ConfigError, match="plan is only for a module of your own"):
        Engine("llama", device="cpu", plan=PLAN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor": {"nothing": "column"}}, "names 'nothing', which matches no parameter; known: "),
        ({"tensor": {"layers.*.feed.upp": "column"}}, "did you mean 'layers.*.feed.up'?"),
        ({"tensor": {"layers.2.feed.up": "column"}}, "did you mean 'layers.*.feed.up'?"),
        ({"tensor": {"layers.*.feed": "column"}}, "names 'layers.*.feed', which"),
        (
            {"tensor": {"head": "collumn"}},
            "has an unknown style 'collumn' for 'head'; did you mean",
        ),
        (
            {"blocks": "layer.*"},
            "names 'layer.*', which matches no parameter; did you mean 'layers",
        ),
        ({"embedding": ("embedding",)}, "did you mean 'embed'?"),
        ({"head": ("norm", "heads")}, "did you mean 'head'?"),
        ({"tied": (("embed.weight", "head.wait"),)}, "did you mean 'head.weight'?"),
    ],
)
def test_a_plan_of_what_the_module_lacks_is_refused_under_every_layout(
    change: dict[str, Any], message: str
) -> None:
    """In one line with what fits, also where the layout would not ask the plan."""
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        Engine(Mine(), device="cpu", plan=evolve(PLAN, **change))
    assert str(caught.value).startswith("the plan of Mine ")
    assert "\n" not in str(caught.value)


class Rude(nn.Module):
    """Takes tokens alone, and returns what it was told to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) to (B, S, width), or one number a row."""
        return self.embed(tokens)


def test_a_module_that_would_compute_something_else_is_refused() -> None:
    """One that knows no documents, no cache, or returns no logits."""
    engine = Engine(Rude(VOCABULARY), device="cpu")
    batch = global_batch(0)
    with pytest.raises(ModelError, match="the batch has packed documents, which Rude"):
        engine.step(batch, NextTokenLoss())
    alone = {name: batch[name] for name in ("tokens", "targets")}
    assert engine.step(alone, NextTokenLoss()).loss > 0
    with pytest.raises(ModelError, match="generation needs a cache argument"):
        engine.generate([[1, 2]], max_new_tokens=2)
    with pytest.raises(ModelError, match="did not append its keys"):
        Engine(Mine(), device="cpu").generate([[1, 2]], max_new_tokens=2)


class Chain(nn.Module):
    """Blocks in a row; `between` applies tanh outside of them."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.between = between

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """(B, S) to (B, S, V)."""
        x: Tensor = self.embed(tokens)
        for block in self.blocks:
            x = block(x).tanh() if self.between else block(x)
        logits: Tensor = self.head(x)
        return logits


CHAIN = ModelPlan(blocks="blocks.*", cuts=(0, 1, 2, 3), embedding=("embed",), head=("head",))


def test_stages_that_would_compute_something_else_are_refused_when_built() -> None:
    """An operation between blocks would run in each stage; inside a block it runs once."""
    halves = [range(2), range(2, 4)]
    check_stages(Chain(between=False), CHAIN, halves)
    with pytest.raises(ModelError, match=r"computes something between its blocks.*pipeline=1"):
        check_stages(Chain(between=True), CHAIN, halves)


def test_the_trial_of_stages_leaves_the_module_as_it_is() -> None:
    """Its blocks, mode and weights; the stages of the trial share the weights."""
    chain = Chain(between=False).train()
    before = {name: value.clone() for name, value in chain.state_dict().items()}
    check_stages(chain, CHAIN, [range(1), range(1, 4)])
    assert chain.training
    assert all(isinstance(block, nn.Linear) for block in chain.blocks)
    assert all(torch.equal(before[name], value) for name, value in chain.state_dict().items())
    assert all(parameter.grad is None for parameter in chain.parameters())


def test_a_forward_without_documents_is_warned_of_when_the_engine_is_built(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before the first row with two documents, which may come late."""
    Engine(Chain(between=False), device="cpu")
    assert "accepts no documents" not in caplog.text
    Engine(Rude(VOCABULARY), device="cpu")
    assert "Rude.forward accepts no documents: a step fails" in caplog.text


def test_frozen_weights_stay_as_they_are() -> None:
    """Neither a gradient nor a decay moves them."""
    mine = Mine()
    mine.embed.requires_grad_(False)
    before = mine.embed.weight.clone()
    engine = Engine(mine, device="cpu", optimizer=AdamWConfig(warmup_steps=0))
    engine.step(global_batch(0), NextTokenLoss())
    assert torch.equal(mine.embed.weight, before)
    assert not any(name.startswith("embed") for name in engine.state_dict())


def test_a_place_is_what_a_stream_asks_for() -> None:
    """`TokenStream(place=groups.place)`: which reader of how many, whatever the other axes."""
    layout = Layout.parse("data=3,tensor=2")
    places = [layout.place(rank) for rank in range(6)]
    assert [place.rank for place in places] == [0, 0, 1, 1, 2, 2]
    assert {place.count for place in places} == {3}
