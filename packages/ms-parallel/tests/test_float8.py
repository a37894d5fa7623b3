"""float8 products: rounding, gradients, training under layouts, refusals."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from runs import VARIANTS, build, global_batch, train
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ms_parallel import ConfigError, Engine, NextTokenLoss
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.models import architecture
from ms_parallel.split.float8 import (
    MAX_E4M3,
    RECIPES,
    Float8Linear,
    Scaling,
    product,
    to_float8,
    to_float32,
)
from ms_parallel.training.options import Options

RUNS = Path(__file__).parent / "runs.py"
SETTINGS = {**VARIANTS["grouped"], "head_dim": 16}
"""All local sizes are multiples of 16, also for two tensor ranks."""
STEPS = 12
LAYOUTS = ("data=2", "tensor=2", "pipeline=2", "context=2")
NAMES = ("rowwise", "blockwise", "mxfp8")
SCALINGS = {
    f"{name} {kind}": getattr(RECIPES[name], kind)
    for name in NAMES
    for kind in ("activation", "weight")
}


def slow_rounding(matrix: Tensor, scaling: Scaling) -> Tensor:
    """Round block by block, with Python numbers for the scales."""
    rounded = torch.empty_like(matrix)
    columns = scaling.columns or matrix.shape[1]
    for row in range(0, len(matrix), scaling.rows):
        for column in range(0, matrix.shape[1], columns):
            at = slice(row, row + scaling.rows), slice(column, column + columns)
            maximum = max(float(matrix[at].abs().max()), 1e-12)
            scale = float(torch.tensor(maximum) / MAX_E4M3)
            if scaling.saturates:
                scale = 2.0 ** (torch.tensor(maximum).log2().floor().item() - 8)
            elif scaling.power_of_two:
                scale = 2.0 ** torch.tensor(scale).log2().ceil().item()
            scaled = (matrix[at] / scale).clamp(-MAX_E4M3, MAX_E4M3)
            rounded[at] = scaled.to(torch.float8_e4m3fn).float() * scale
    return rounded


@pytest.mark.parametrize("name", SCALINGS)
def test_rounding_equals_a_slow_one(name: str) -> None:
    """For sizes that divide into blocks and others, zeros, and widely spread magnitudes."""
    generator = torch.Generator().manual_seed(0)
    compared = 0
    for shape in ((3, 32), (130, 140), (1, 257), (256, 128)):
        spread = torch.randn(shape, generator=generator) * 4
        matrix = torch.randn(shape, generator=generator) * spread.exp()
        matrix[0] = 0
        matrix[-1, 0] = 448.0 * 2**-10
        rounded = to_float32(to_float8(matrix, SCALINGS[name]))
        torch.testing.assert_close(rounded, slow_rounding(matrix, SCALINGS[name]), rtol=0, atol=0)
        compared += rounded.numel()
    assert compared > 50_000


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", SCALINGS)
def test_numbers_that_are_not_finite_stay_so(name: str, bad: float) -> None:
    """Otherwise a step with a broken gradient would not be skipped."""
    matrix = torch.ones(2, 64)
    matrix[1, 5] = bad
    assert not to_float32(to_float8(matrix, SCALINGS[name])).isfinite().all()


def test_the_emulated_product_equals_torchs() -> None:
    """Torch's float8 product with scales per row, which also runs on a CPU."""
    generator = torch.Generator().manual_seed(0)
    recipe = RECIPES["rowwise"]
    for m, n, k in ((16, 32, 48), (5, 16, 100), (64, 128, 256)):
        a = to_float8(torch.randn(m, k, generator=generator), recipe.activation)
        b = to_float8(torch.randn(n, k, generator=generator), recipe.weight)
        emulated = product(a, b, torch.bfloat16, on_gpu=False)
        real = product(a, b, torch.bfloat16, on_gpu=True)
        torch.testing.assert_close(real, emulated, rtol=2**-7, atol=1e-3)


class ScaledProducts(TorchDispatchMode):
    """Records the arguments of torch's float8 products."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_mm_v2.default:
            a, b, (scale_a,), _, _, (scale_b,) = args[:6]
            self.calls.append((a, b, scale_a, scale_b))
        return func(*args, **(kwargs or {}))


def test_the_products_of_a_layer_have_the_memory_layout_that_a_gpu_needs() -> None:
    """As torch's CUDA kernel with scales per row documents it; here for 37 tokens."""
    layer = nn.Linear(48, 32)
    layer.__class__ = Float8Linear
    layer.recipe, layer.on_gpu = RECIPES["rowwise"], True  # type: ignore[assignment]
    with ScaledProducts() as recorded:
        x = torch.randn(37, 48, requires_grad=True)
        layer(x).sum().backward()
    sizes = [(len(a), b.shape[1], a.shape[1]) for a, b, *_ in recorded.calls]
    assert sizes == [(37, 32, 48), (37, 48, 32), (32, 48, 48)]  # 37 tokens are padded to 48
    for a, b, scale_a, scale_b in recorded.calls:
        assert a.stride() == (a.shape[1], 1)
        assert b.stride() == (1, b.shape[0])
        assert a.shape[1] % 16 == b.shape[1] % 16 == 0
        assert (scale_a.shape, scale_b.shape) == ((len(a), 1), (1, b.shape[1]))
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_products_of_rounded_factors(name: str) -> None:
    """Outputs and all gradients of a layer, from the formulas."""
    recipe, generator = RECIPES[name], torch.Generator().manual_seed(0)
    layer = nn.Linear(48, 32)
    layer.__class__ = Float8Linear
    layer.recipe, layer.on_gpu = recipe, False  # type: ignore[assignment]
    x = torch.randn(3, 7, 48, generator=generator, requires_grad=True)
    gradient = torch.randn(3, 7, 32, generator=generator)
    output = layer(x)
    output.backward(gradient)
    rows, dy, weight = x.detach().flatten(0, 1), gradient.flatten(0, 1), layer.weight.detach()

    def act(matrix: Tensor) -> Tensor:
        return slow_rounding(matrix.contiguous(), recipe.activation)

    def of_weight(matrix: Tensor) -> Tensor:
        return slow_rounding(matrix.contiguous(), recipe.weight)

    expected = {
        "output": act(rows) @ of_weight(weight).t() + layer.bias.detach(),
        "dx": act(dy) @ of_weight(weight.t()).t(),
        "dw": act(dy.t()) @ act(rows.t()).t(),
        "db": dy.sum(0),
    }
    assert x.grad is not None
    computed = {
        "output": output.detach().flatten(0, 1),
        "dx": x.grad.flatten(0, 1),
        "dw": layer.weight.grad,
        "db": layer.bias.grad,
    }
    for key, value in expected.items():
        torch.testing.assert_close(computed[key], value, rtol=1e-6, atol=1e-6, msg=key)


@cache
def curve(name: str, **options: Any) -> list[float]:
    """Losses of one process."""
    groups = connect(Layout(), device="cpu")
    return train(build(SETTINGS, groups, float8=name, **options), STEPS)[0]


@pytest.mark.parametrize("name", NAMES)
def test_losses_follow_those_of_float32(name: str) -> None:
    """They differ, but the loss falls as far."""
    plain, rounded = curve("none"), curve(name)
    assert rounded != plain
    assert rounded[-1] < rounded[0] - 0.6
    assert rounded == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize("mode", ["selective", "attention", "full"])
def test_recomputed_blocks_give_the_same_losses(mode: str) -> None:
    """Rounding is deterministic."""
    groups = connect(Layout(), device="cpu")
    engine = build(SETTINGS, groups, float8="mxfp8", recompute=mode)
    assert train(engine, 3)[0] == curve("mxfp8")[:3]


@cache
def layout_curves() -> dict[str, list[float]]:
    """Losses of two steps under layouts of two processes, by layout and recipe."""
    jobs = [
        {"layout": layout, "settings": SETTINGS, "steps": 2, "options": {"float8": name}}
        for name in NAMES
        for layout in LAYOUTS
    ]
    results = run_processes(2, RUNS, "curves", jobs=jobs)[0]
    return {
        f"{job['layout']} {job['options']['float8']}": result["losses"]
        for job, result in zip(jobs, results, strict=True)
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_the_losses_of_one_process(layout: str, name: str) -> None:
    """Up to the rounding of gradients, whose scales depend on the tokens of a process."""
    losses = layout_curves()[f"{layout} {name}"]
    assert losses == pytest.approx(curve(name)[:2], rel=5e-3)
    assert losses[0] == pytest.approx(curve(name)[0], rel=2e-3)


def test_pipelines_are_exact() -> None:
    """A stage computes with the same microbatches as one process."""
    assert layout_curves()["pipeline=2 mxfp8"] == pytest.approx(curve("mxfp8")[:2], rel=1e-6)


@pytest.mark.slow  # compiles for half a minute
def test_compiled_blocks_give_the_same_losses() -> None:
    """Rounding inside a compiled block is the same."""
    assert curve("rowwise", compile=True) == pytest.approx(curve("rowwise"), rel=1e-4)


def test_an_audit_measures_the_rounding() -> None:
    """The gradient's error is a few percent, and raises no alarm."""
    engine = build(SETTINGS, connect(Layout(), device="cpu"), float8="blockwise", audit_every=1)
    audit = engine.step(global_batch(0), NextTokenLoss()).audit
    assert audit is not None
    assert 0.005 < max(group.error for group in audit.groups.values()) < 0.5
    assert audit.alarms == ()


def test_what_cannot_be_combined_is_refused_in_one_line() -> None:
    """With the setting to change."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    odd = architecture("llama", {"hidden_size": 20, "intermediate_size": 24, **sizes})
    with pytest.raises(ConfigError, match=r"multiples of 16, got .* set float8 to none"):
        Engine(odd, float8="rowwise", device="cpu")
    with pytest.raises(ConfigError, match=r"'rowwse'.*did you mean 'rowwise'"):
        Options(model_arch="llama", float8="rowwse")
    even = architecture("llama", {"hidden_size": 32, "intermediate_size": 48, **sizes})
    with pytest.raises(ConfigError, match="reproducible=True cannot be combined with float8"):
        Engine(even, float8="mxfp8", reproducible=True, device="cpu")
    with pytest.raises(ConfigError, match="'ZB-H1', which splits the backward pass"):
        Engine(even, float8="rowwise", schedule="zb-h1", device="cpu")
    with pytest.raises(ConfigError, match="which is emulated; set float8 to rowwise"):
        Engine(even, float8="mxfp8", compile=True, device="cpu")


def test_layers_of_other_sizes_keep_their_precision(caplog: pytest.LogCaptureFixture) -> None:
    """They are named once."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = architecture("llama", {"hidden_size": 32, "intermediate_size": 40, **sizes})
    engine = Engine(config, float8="rowwise", device="cpu")
    (warning,) = [record.getMessage() for record in caplog.records if "float8" in record.msg]
    assert "mlp.gate_proj" in warning
    assert "q_proj" not in warning
    assert engine.module is not None
    layers = [type(module) for module in engine.module.modules()]
    assert layers.count(Float8Linear) == 4
