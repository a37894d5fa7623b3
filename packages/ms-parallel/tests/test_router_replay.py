"""Routers record the experts that they select, and replay recorded ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from runs import FAMILIES, global_batch, tiny
from torch import Tensor, nn

from ms_parallel import Engine, Layout
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.errors import ConfigError
from ms_parallel.models.experts.routing import record_experts, replay_experts, routers_of

ROWS = 4
SPLITS = Path(__file__).with_name("splits.py")
FAMILY = {**FAMILIES["deepseek_v3"], "num_nextn_predict_layers": 0}


def favor(module: nn.Module) -> nn.Module:
    """Change the biases with which routers select experts, which change no weight of an expert."""
    for router in routers_of(module).values():
        router.e_score_correction_bias.copy_(torch.arange(len(router.e_score_correction_bias)))
    return module


def engine_of(**options: Any) -> Engine:
    """Build an engine of a small mixture."""
    return Engine(tiny(**FAMILY), Layout(), **options)


def recorded(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Experts of a forward pass, (B, S, L, k)."""
    inputs = {name: batch[name] for name in ("positions", "documents")}
    with torch.no_grad(), record_experts(module) as experts:
        module(batch["tokens"], **inputs)
        return experts()


def gradients(engine: Engine, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of one step."""
    grads: dict[str, Tensor] = {}

    def record(gradients: dict[str, Tensor] | None, norm: float, rate: float) -> None:
        assert gradients is not None
        grads.update({name: gradient.clone() for name, gradient in gradients.items()})

    engine.trained.apply = record  # type: ignore[method-assign,assignment]
    engine.step(batch, NextTokenLoss())
    return grads


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_replayed_gradients_equal_those_of_the_recorded_choice_bit_for_bit(recompute: str) -> None:
    """The replaying model would select other experts; its recomputation replays them too."""
    batch = dict(global_batch(0, rows=ROWS))
    engine, favored, other = (engine_of(recompute=recompute) for _ in range(3))
    for changed in (favored, other):
        favor(changed.stages[0])
    experts = recorded(engine.stages[0], batch)
    assert (recorded(favored.stages[0], batch) != experts).any()
    expected = gradients(engine, batch)
    actual = gradients(favored, {**batch, "routed_experts": experts.to(torch.int16)})
    differing = gradients(other, batch)
    assert len(expected) > 10
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert any(not torch.equal(expected[name], differing[name]) for name in expected)


def test_differing_selections_are_counted_and_negative_experts_are_selected() -> None:
    """One of two rows is replayed; the counts cover only its tokens."""
    batch, module = dict(global_batch(0, rows=2)), engine_of().stages[0]
    own = recorded(module, batch)
    favor(module)
    selected = recorded(module, batch)
    mixed = own.clone()
    mixed[1] = -1
    with torch.no_grad(), record_experts(module) as experts:
        with replay_experts(module, mixed) as counts:
            module(batch["tokens"], positions=batch["positions"], documents=batch["documents"])
        routed = experts()
    assert torch.equal(routed[0], own[0])
    assert torch.equal(routed[1, :, 0], selected[1, :, 0])
    count, differing = counts()
    assert count == own[0, :, :, 0].numel()
    differs = (own[0].sort(-1).values != selected[0].sort(-1).values).any(-1)  # (S, L)
    assert differing >= int(differs[:, 0].sum()) > 0
    assert torch.equal(recorded(module, batch), selected)


def test_experts_of_another_model_are_rejected() -> None:
    """A dense model, and a wrong number of layers."""
    module, dense = engine_of().stages[0], Engine(tiny(), Layout()).stages[0]
    experts = torch.zeros(2, 4, 9, 2)
    with pytest.raises(ConfigError, match=r"must be \(B, S, "), replay_experts(module, experts):
        pass
    with pytest.raises(ConfigError, match="this one is dense"), replay_experts(dense, experts):
        pass
    with pytest.raises(ConfigError, match="has none"), record_experts(dense):
        pass


@pytest.mark.slow
def test_replayed_gradients_are_equal_under_every_layout() -> None:
    """Sequence slices, split positions, stages and dispatched tokens get their own experts."""
    layouts = ["data=1", "tensor=2", "context=2", "pipeline=2", "data=2,expert=2"]
    recompute = {"options": {"recompute": "full"}}
    jobs = [
        {"layout": layout, "settings": FAMILY, "rows": ROWS, "replay": True, **recompute}
        for layout in layouts
    ]
    (expected,) = run_processes(1, SPLITS, "gradients", jobs=jobs[:1], digits="float64")
    free = run_processes(
        1, SPLITS, "gradients", jobs=[{**jobs[0], "replay": False}], digits="float64"
    )
    router = next(name for name in expected[0] if name.endswith("mlp.gate.weight"))
    assert expected[0][router] != pytest.approx(free[0][0][router], rel=1e-3)
    compared = 0
    for rank in run_processes(2, SPLITS, "gradients", jobs=jobs[1:], digits="float64"):
        for grads in rank:
            for name, gradient in grads.items():
                assert gradient == pytest.approx(expected[0][name], rel=1e-9, abs=1e-12), name
                compared += 1
    assert compared > 100
