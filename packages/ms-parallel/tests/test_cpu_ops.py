"""RMS norm and rotary embedding with explicit gradients, against torch's in float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ms_parallel import operators as ops
from ms_parallel.operators import cpu as cpu_ops
from ms_parallel.operators import plain

B, S, HEADS, D = 2, 5, 3, 8


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm by torch."""
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def complex_rotation(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs (i, i + D/2) as complex numbers, times e^(i angle)."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles[:, :, None])
    return torch.cat((z.real, z.imag), -1)


def transformers_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As in transformers; our outputs are bit-identical."""
    cos, sin = (torch.cat((part, part), -1)[:, :, None] for part in (cos, sin))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def random_leaf(*shape: int) -> Tensor:
    """Normal random numbers that require a gradient."""
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def gradients(
    f: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor, *, second_order: bool = False
) -> list[Tensor]:
    """Gradients of a weighted sum of the outputs, or second-order gradients of their squares."""
    first = torch.autograd.grad((f(*inputs) * upstream).sum(), inputs, create_graph=second_order)
    if not second_order:
        return list(first)
    return list(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))


@pytest.mark.parametrize(
    "second_order", [False, True], ids=["gradient", "gradient of the gradient"]
)
@pytest.mark.parametrize("shape", [(7,), (4, 2), (2, 3, 256), (1, 2, 3, 8)], ids=str)
def test_rms_norm_and_its_gradients_equal_torchs(
    shape: tuple[int, ...], second_order: bool
) -> None:
    """Within float32 roundings."""
    true = [random_leaf(*shape), random_leaf(shape[-1])]
    upstream = torch.randn(shape, dtype=torch.float64)
    inputs = [t.detach().float().requires_grad_() for t in true]
    assert cpu_ops.serves(*inputs)
    assert torch.equal(ops.rms_norm(*inputs), norm(*inputs))
    grads = gradients(ops.rms_norm, inputs, upstream.float(), second_order=second_order)
    expected = gradients(norm, true, upstream, second_order=second_order)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5 * float(b.abs().max()))


def test_a_row_of_zeros_has_a_finite_gradient() -> None:
    """It is one over the square root of eps."""
    x = torch.zeros(2, 4, requires_grad=True)
    ops.rms_norm(x, nn.Parameter(torch.ones(4))).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 4), 1e3))


def test_a_frozen_weight_gets_no_gradient() -> None:
    """As with LoRA."""
    x, weight = torch.randn(3, 4, requires_grad=True), nn.Parameter(torch.ones(4), False)
    ops.rms_norm(x, weight).square().sum().backward()
    assert x.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize("in_place", [False, True], ids=["CPU", "accelerator"])
@pytest.mark.parametrize(
    "second_order", [False, True], ids=["gradient", "gradient of the gradient"]
)
def test_rotary_and_its_gradient_are_a_rotation_of_complex_numbers(
    second_order: bool, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With different numbers of query and key heads."""
    monkeypatch.setattr(plain, "_rotates_in_place", lambda *_: in_place)
    q, k = random_leaf(B, S, HEADS, D), random_leaf(B, S, 1, D)
    angles = torch.rand(B, S, D // 2, dtype=torch.float64)
    cos, sin = angles.cos().float(), angles.sin().float()
    up = torch.randn(B, S, HEADS, D, dtype=torch.float64)

    rotated = ops.rotary(q.float(), q.float(), cos, sin)[0]
    expected_rotation = transformers_rotation(q.float(), cos, sin)
    if in_place:  # with fused multiplications and additions, which round once
        torch.testing.assert_close(rotated, expected_rotation, rtol=2e-6, atol=2e-6)
    else:
        assert torch.equal(rotated, expected_rotation)

    def both(q: Tensor, k: Tensor) -> Tensor:
        a, b = ops.rotary(q, k, cos, sin)
        return a.square() * b

    def true(q: Tensor, k: Tensor) -> Tensor:
        return complex_rotation(q, angles).square() * complex_rotation(k, angles)

    inputs = [t.detach().float().requires_grad_() for t in (q, k)]
    grads = gradients(both, inputs, up.float(), second_order=second_order)
    expected = gradients(true, [q, k], up, second_order=second_order)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5 * float(b.abs().max()))


def test_per_sample_gradients_by_vmap_equal_separate_ones() -> None:
    """As in differential privacy."""
    x, weight = torch.randn(3, 4, 8), torch.rand(8)
    cos, sin = torch.rand(1, 4, 4), torch.rand(1, 4, 4)

    def loss(weight: Tensor, rows: Tensor) -> Tensor:
        normal = ops.rms_norm(rows, weight)[None, :, None]
        return ops.rotary(normal, normal, cos, sin)[0].square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x)
    separate = torch.stack([torch.func.grad(loss)(weight, rows) for rows in x])
    leaf = weight.clone().requires_grad_()
    autograd = torch.stack([torch.autograd.grad(loss(leaf, rows), leaf)[0] for rows in x])
    torch.testing.assert_close(per_sample, separate)
    torch.testing.assert_close(per_sample, autograd)


def test_other_dtypes_and_traced_graphs_use_torchs_operator() -> None:
    """Compilers fuse it, or it would not be faster."""
    x = torch.randn(2, 8)
    assert not cpu_ops.serves(x, x.bfloat16())
    assert not cpu_ops.serves(x.to("meta"))
    compiled = torch.compile(lambda x, w: ops.rms_norm(x, w), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, torch.ones(8)), norm(x, torch.ones(8)))
