"""Norm and rotation with gradients written out, beside torch's own in float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ms_parallel import operators as ops
from ms_parallel.operators import cpu as cpu_ops

B, S, HEADS, D = 2, 5, 3, 8


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Torch's own, op by op."""
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs (i, i + D/2) as complex numbers, times e^(i angle)."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles[:, :, None])
    return torch.cat((z.real, z.imag), -1)


def op_by_op(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers writes it, which our outputs are bit for bit."""
    cos, sin = (torch.cat((part, part), -1)[:, :, None] for part in (cos, sin))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def draw(*shape: int) -> Tensor:
    """Normal numbers that take a gradient."""
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def gradients(
    f: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor, *, of_them: bool = False
) -> list[Tensor]:
    """Gradients of a weighted sum of the outputs; or of the squares of these gradients."""
    first = torch.autograd.grad((f(*inputs) * upstream).sum(), inputs, create_graph=of_them)
    if not of_them:
        return list(first)
    return list(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))


@pytest.mark.parametrize("of_them", [False, True], ids=["gradient", "gradient of the gradient"])
@pytest.mark.parametrize("shape", [(7,), (4, 2), (2, 3, 256), (1, 2, 3, 8)], ids=str)
def test_rms_norm_and_its_gradients_are_torchs(shape: tuple[int, ...], of_them: bool) -> None:
    """To float32's rounding."""
    true = [draw(*shape), draw(shape[-1])]
    upstream = torch.randn(shape, dtype=torch.float64)
    mine = [t.detach().float().requires_grad_() for t in true]
    assert cpu_ops.serves(*mine)
    assert torch.equal(ops.rms_norm(*mine), norm(*mine))
    found = gradients(ops.rms_norm, mine, upstream.float(), of_them=of_them)
    wanted = gradients(norm, true, upstream, of_them=of_them)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5 * float(b.abs().max()))


def test_a_row_of_zeros_has_a_finite_gradient() -> None:
    """One over the root of eps."""
    x = torch.zeros(2, 4, requires_grad=True)
    ops.rms_norm(x, nn.Parameter(torch.ones(4))).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 4), 1e3))


def test_a_frozen_weight_takes_no_gradient() -> None:
    """As under LoRA."""
    x, weight = torch.randn(3, 4, requires_grad=True), nn.Parameter(torch.ones(4), False)
    ops.rms_norm(x, weight).square().sum().backward()
    assert x.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize("of_them", [False, True], ids=["gradient", "gradient of the gradient"])
def test_rotary_and_its_gradient_are_a_rotation_of_complex_numbers(of_them: bool) -> None:
    """Heads of queries and of keys differ in number."""
    q, k = draw(B, S, HEADS, D), draw(B, S, 1, D)
    angles = torch.rand(B, S, D // 2, dtype=torch.float64)
    cos, sin = angles.cos().float(), angles.sin().float()
    up = torch.randn(B, S, HEADS, D, dtype=torch.float64)

    assert torch.equal(ops.rotary(q.float(), q.float(), cos, sin)[0], op_by_op(q.float(), cos, sin))

    def both(q: Tensor, k: Tensor) -> Tensor:
        a, b = ops.rotary(q, k, cos, sin)
        return a.square() * b

    def true(q: Tensor, k: Tensor) -> Tensor:
        return turned(q, angles).square() * turned(k, angles)

    mine = [t.detach().float().requires_grad_() for t in (q, k)]
    found = gradients(both, mine, up.float(), of_them=of_them)
    wanted = gradients(true, [q, k], up, of_them=of_them)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5 * float(b.abs().max()))


def test_gradients_of_each_sample_by_vmap_are_those_of_each_alone() -> None:
    """As differential privacy asks for."""
    x, weight = torch.randn(3, 4, 8), torch.rand(8)
    cos, sin = torch.rand(1, 4, 4), torch.rand(1, 4, 4)

    def loss(weight: Tensor, rows: Tensor) -> Tensor:
        normal = ops.rms_norm(rows, weight)[None, :, None]
        return ops.rotary(normal, normal, cos, sin)[0].square().sum()

    of_each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x)
    alone = torch.stack([torch.func.grad(loss)(weight, rows) for rows in x])
    plain = weight.clone().requires_grad_()
    by_tape = torch.stack([torch.autograd.grad(loss(plain, rows), plain)[0] for rows in x])
    torch.testing.assert_close(of_each, alone)
    torch.testing.assert_close(of_each, by_tape)


def test_other_dtypes_and_traced_graphs_take_torchs_own_way() -> None:
    """Where a compiler fuses, or nothing was gained."""
    x = torch.randn(2, 8)
    assert not cpu_ops.serves(x, x.bfloat16())
    assert not cpu_ops.serves(x.to("meta"))
    compiled = torch.compile(lambda x, w: ops.rms_norm(x, w), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, torch.ones(8)), norm(x, torch.ones(8)))
