"""torch.func and forward-mode differentiation use the reference at every size."""

import pytest
import torch
from torch.autograd import forward_ad

import ms_kernels
from ms_kernels import BackendError, explain, rms_norm, use_backend
from ms_kernels.operators import CONTRACTS

DIFFERENTIABLE = [
    name
    for name, contract in CONTRACTS.items()
    if any(argument.differentiable for argument in contract.arguments)
]


def loss_of(operator):
    """Return a scalar function of an operator's differentiable arguments, and their values."""
    contract = CONTRACTS[operator]
    example = contract.draw({}, dtype=torch.float64)
    options = {option.name: option.default for option in contract.options}
    values = {
        argument.name: example[argument.name]
        for argument in contract.arguments
        if argument.differentiable
    }

    def loss(inputs):
        results = getattr(ms_kernels, operator)(**{**example, **inputs}, **options)
        results = results if isinstance(results, tuple) else (results,)
        return sum(result.square().sum() for result in results if result.is_floating_point())

    return loss, values


def gradients_of(loss, values):
    """Return the gradients from autograd."""
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    return dict(zip(leaves, torch.autograd.grad(loss(leaves), list(leaves.values())), strict=True))


@pytest.mark.parametrize("operator", DIFFERENTIABLE)
def test_transforms_give_the_gradients_of_autograd(operator):
    """torch.func.grad, its vmap, jvp, and forward-mode duals, for every operator in float64."""
    loss, values = loss_of(operator)
    expected = gradients_of(loss, values)
    generator = torch.Generator().manual_seed(0)
    directions = {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float64)
        for name, value in values.items()
    }
    directional = sum((expected[name] * directions[name]).sum() for name in values)

    grads = torch.func.grad(loss)(values)
    stacked = {name: torch.stack((value, 2 * value)) for name, value in values.items()}
    per_sample = torch.func.vmap(torch.func.grad(loss))(stacked)
    _, jvp = torch.func.jvp(loss, (values,), (directions,))
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(value, directions[name]) for name, value in values.items()
        }
        forward_mode = forward_ad.unpack_dual(loss(duals)).tangent

    # The same float64 sums of up to 10,000 terms in another order.
    tolerance = {"rtol": 1e-9, "atol": 1e-9}
    doubled = gradients_of(loss, {name: 2 * value for name, value in values.items()})
    for name in values:
        torch.testing.assert_close(grads[name], expected[name], **tolerance)
        torch.testing.assert_close(per_sample[name][0], expected[name], **tolerance)
        torch.testing.assert_close(per_sample[name][1], doubled[name], **tolerance)
    torch.testing.assert_close(jvp, directional, **tolerance)
    torch.testing.assert_close(forward_mode, directional, **tolerance)


@pytest.mark.parametrize("rows", [8, 4096])
def test_a_transform_does_not_depend_on_the_size(rows):
    """The CPU kernels pay off from some size on, but are never used under torch.func."""
    x, weight, grad_out = torch.randn(rows, 512), torch.ones(512), torch.randn(512)

    def loss(row):
        return (rms_norm(row, weight) * grad_out).sum()

    expected = gradients_of(lambda inputs: loss(inputs["x"]), {"x": x})["x"]
    # float32 sums of 512 terms of order one in another order.
    torch.testing.assert_close(torch.func.grad(loss)(x), expected, rtol=1e-5, atol=1e-5)
    per_sample = torch.func.vmap(torch.func.grad(loss))(x)
    torch.testing.assert_close(per_sample, expected, rtol=1e-5, atol=1e-5)


def test_a_forced_backend_that_cannot_be_transformed_is_an_error():
    """`use_backend` is not silently overruled; the message names the reason."""
    x, weight = torch.randn(4096, 512), torch.ones(512)
    assert explain("rms_norm", x, weight).backend == "cpu"
    with use_backend("cpu"), pytest.raises(BackendError, match=r"opaque to torch\.func"):
        torch.func.grad(lambda inputs: rms_norm(inputs, weight).sum())(x)
    with use_backend("cpu", "reference"):
        assert torch.func.grad(lambda inputs: rms_norm(inputs, weight).sum())(x).shape == x.shape
