"""A custom module runs in the engine unchanged and trains as in plain torch."""

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


def plain_torch_losses() -> list[float]:
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
        from ms_parallel.optim.optimizer import learning_rate

        batch = global_batch(step)
        logits = model(batch["tokens"], documents=batch["documents"])
        token_losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["targets"].flatten(), reduction="none"
        )
        weights = (batch["weights"] * (batch["targets"] >= 0)).flatten()
        loss = (token_losses * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or 1e9)
        for group in adam.param_groups:
            group["lr"] = learning_rate(step, config)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


def test_every_layout_gives_the_losses_of_plain_torch(tmp_path: Path) -> None:
    """Also with microbatches, recomputation and a reload of the state."""
    expected = plain_torch_losses()
    assert expected[-1] < expected[0]
    single: list[dict[str, Any]] = [
        {"layout": "", "steps": STEPS},
        {"layout": "", "steps": STEPS, "plan": True, "recompute": "full", "microbatch_size": 1},
    ]
    pair: list[dict[str, Any]] = [
        {"layout": "data=2", "steps": STEPS},
        {"layout": "data=2", "steps": FEW, "plan": True, "microbatch_size": 1},
        {"layout": "data=2", "steps": STEPS, "keep": 3, "folder": str(tmp_path / "kept")},
        {"layout": "tensor=2", "steps": STEPS, "plan": True, "microbatch_size": 2},
        {"layout": "pipeline=2", "steps": FEW, "plan": True, "microbatch_size": 1},
    ]
    quad: list[dict[str, Any]] = [
        {"layout": f"{axis}=2,pipeline=2", "steps": FEW, "plan": True, "microbatch_size": 1}
        for axis in ("data", "tensor")
    ]
    ranks = [
        *run_processes(1, CHILD, "train_jobs", jobs=single),
        *run_processes(2, CHILD, "train_jobs", jobs=pair),
        *run_processes(4, CHILD, "train_jobs", jobs=quad),
    ]
    for result in ranks:
        for job in result:
            # Six steps with float32 sums over rows in a different order.
            assert job["losses"] == pytest.approx(expected[: len(job["losses"])], rel=1e-5)
    assert ranks[1][0]["sum"] + ranks[2][0]["sum"] == pytest.approx(ranks[0][0]["sum"], abs=1e-3)


def test_unsupported_layouts_are_refused_with_the_reason() -> None:
    """Stages need a plan with blocks, and the tensor axis needs a plan."""
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
def test_a_plan_with_unknown_names_is_refused(change: dict[str, Any], message: str) -> None:
    """The one-line error suggests a name, even if the layout does not use the plan."""
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        Engine(Mine(), device="cpu", plan=evolve(PLAN, **change))
    assert str(caught.value).startswith("the plan of Mine ")
    assert "\n" not in str(caught.value)


class TokensOnly(nn.Module):
    """A model that accepts only tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) to (B, S, width)."""
        return self.embed(tokens)


def test_a_module_with_an_insufficient_forward_is_refused() -> None:
    """It lacks documents, a cache, or logits."""
    engine = Engine(TokensOnly(VOCABULARY), device="cpu")
    batch = global_batch(0)
    with pytest.raises(ModelError, match="the batch has packed documents, which TokensOnly"):
        engine.step(batch, NextTokenLoss())
    unpacked = {name: batch[name] for name in ("tokens", "targets")}
    assert engine.step(unpacked, NextTokenLoss()).loss > 0
    with pytest.raises(ModelError, match="generation needs a cache argument"):
        engine.generate([[1, 2]], max_new_tokens=2)
    with pytest.raises(ModelError, match="did not append its keys"):
        Engine(Mine(), device="cpu").generate([[1, 2]], max_new_tokens=2)


class Chain(nn.Module):
    """A chain of blocks; with `between`, tanh is applied between blocks."""

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


def test_stages_that_would_compute_something_else_are_refused() -> None:
    """An operation between blocks would run in every stage; inside a block it runs once."""
    halves = [range(2), range(2, 4)]
    check_stages(Chain(between=False), CHAIN, halves)
    with pytest.raises(ModelError, match=r"computes something between its blocks.*pipeline=1"):
        check_stages(Chain(between=True), CHAIN, halves)


def test_a_trial_of_stages_does_not_change_the_module() -> None:
    """Blocks, mode and weights are unchanged; the trial's stages share the weights."""
    chain = Chain(between=False).train()
    before = {name: value.clone() for name, value in chain.state_dict().items()}
    check_stages(chain, CHAIN, [range(1), range(1, 4)])
    assert chain.training
    assert all(isinstance(block, nn.Linear) for block in chain.blocks)
    assert all(torch.equal(before[name], value) for name, value in chain.state_dict().items())
    assert all(parameter.grad is None for parameter in chain.parameters())


def test_an_engine_warns_about_a_forward_without_documents(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not only at the first row with two documents, which may come late."""
    Engine(Chain(between=False), device="cpu")
    assert "accepts no documents" not in caplog.text
    Engine(TokensOnly(VOCABULARY), device="cpu")
    assert "TokensOnly.forward accepts no documents: a step fails" in caplog.text


def test_frozen_weights_do_not_change() -> None:
    """Neither gradients nor weight decay change them."""
    model = Mine()
    model.embed.requires_grad_(False)
    before = model.embed.weight.clone()
    engine = Engine(model, device="cpu", optimizer=AdamWConfig(warmup_steps=0))
    engine.step(global_batch(0), NextTokenLoss())
    assert torch.equal(model.embed.weight, before)
    assert not any(name.startswith("embed") for name in engine.state_dict())


def test_a_place_has_what_a_stream_needs() -> None:
    """`TokenStream(place=groups.place)` needs the reader's rank and the number of readers."""
    layout = Layout.parse("data=3,tensor=2")
    places = [layout.place(rank) for rank in range(6)]
    assert [place.rank for place in places] == [0, 0, 1, 1, 2, 2]
    assert {place.count for place in places} == {3}
