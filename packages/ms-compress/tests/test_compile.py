"""Under torch.compile a prepared model is one graph and rounds like its target."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from models import SINGLE_LEVEL, decoder, tokens
from test_rounding import weights
from torch import Tensor, nn
from torch.nn import functional as F

from ms_compress import prune, qat
from ms_compress.quantization.rounding import round_activations, round_weight
from ms_compress.targets.rules import scheme


@pytest.fixture(autouse=True)
def _reset_compiled_graphs() -> Iterator[None]:
    """Compiled graphs of other tests would count toward the recompilation limit."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


SAMPLE = {"ct.int4_g32", "ct.w4a16_asym_g32", "ct.fp8_block", "ct.nvfp4", "gguf.q4_0"}
"""Schemes that inductor compiles by default: symmetric, with zero points, in blocks of float8, with
two levels of scales, and with float16 scales. Slow tests compile all."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in SINGLE_LEVEL],
)
def test_inductor_rounds_bit_for_bit(name: str) -> None:
    """Also for zeros, ties and scales below float16's normal range: inductor elides no cast."""
    target = scheme(name)

    def rounded(x: Tensor) -> tuple[Tensor, ...]:
        weight = round_weight(x, target)
        if target.activations is None:
            return (weight,)
        # The largest input is that of a calibration, for schemes that have one.
        return weight, round_activations(x, target.activations, None, x.abs().amax())

    x = torch.cat([weights(1.0), weights(1e-5)])
    for compiled, eager in zip(torch.compile(rounded, fullgraph=True)(x), rounded(x), strict=True):
        assert torch.equal(compiled, eager)


FAST_CASES = {("ct.w8a8", False), ("gguf.q4_0", True)}
"""Scales per row and per input, and learned ones per group."""


@pytest.mark.parametrize(
    ("name", "learned"),
    [
        pytest.param(*case, marks=() if case in FAST_CASES else pytest.mark.slow)
        for case in [
            *((name, False) for name in SINGLE_LEVEL if scheme(name).has_zero),
            ("ct.int4_g32", True),
            ("gguf.q4_0", True),
        ]
    ],
)
def test_prepared_model_is_one_graph(name: str, learned: bool) -> None:
    """Forward and backward, pruned or with learned scales, same as without the compiler."""

    def trained(wrap: Callable[..., Callable[[Tensor], Tensor]]) -> tuple[Tensor, nn.Module]:
        model = decoder(1)
        if not learned:
            prune(model, "2:4")
        qat(model, name, learned_scales=learned)

        def loss_of(batch: Tensor) -> Tensor:
            return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

        loss = wrap(loss_of)(tokens())
        loss.backward()
        return loss, model

    loss, model = trained(lambda run: run)
    compiled_loss, compiled = trained(
        lambda run: torch.compile(run, fullgraph=True, backend="aot_eager")
    )
    torch.testing.assert_close(compiled_loss, loss)
    compiled_parameters = dict(compiled.named_parameters())
    for parameter, value in model.named_parameters():
        assert (compiled_parameters[parameter].grad is None) == (value.grad is None), parameter
        if value.grad is not None:
            torch.testing.assert_close(
                compiled_parameters[parameter].grad, value.grad, rtol=1e-4, atol=1e-6
            )


class TwoLayers(nn.Module):
    """One forward method and so one graph; torch compiles an `nn.Sequential` layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 128)
        self.down = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 128) to (B, 128)."""
        return self.down(self.up(x))


def two_layers() -> tuple[nn.Module, Tensor]:
    """Return two linear layers and their input."""
    return TwoLayers(), torch.ones(2, 128)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (two_layers, sorted(SAMPLE)),
        pytest.param(two_layers, SINGLE_LEVEL, marks=pytest.mark.slow),
        pytest.param(lambda: (decoder(1), tokens()), SINGLE_LEVEL, marks=pytest.mark.slow),
    ],
    ids=["sample", "layers", "decoder"],
)
def test_all_schemes_in_one_process(
    make: Callable[[], tuple[nn.Module, Tensor]], names: Sequence[str]
) -> None:
    """A scheme's numbers do not become graph inputs when another scheme follows."""
    # The same functions are compiled once per scheme.
    with torch._dynamo.config.patch(recompile_limit=2 * len(SINGLE_LEVEL)):
        for name in names:
            model, inputs = make()
            qat(model, name)
            model.compile(fullgraph=True, backend="aot_eager")
            model(inputs).sum().backward()
            assert all(p.grad is not None for p in model.parameters()), name
