"""torch.func and forward-mode differentiation: the reference answers, at every size."""

import pytest
import torch
from torch.autograd import forward_ad

import ms_kernels
from ms_kernels import BackendError, explain, rms_norm, use_backend
from ms_kernels.operators import CONTRACTS

DIFFERENTIABLE = [
    name
    for name, contract in CONTRACTS.items()
    if not contract.mutates and any(each.differentiable for each in contract.arguments)
]


def losses_of(operator):
    """Return a scalar function of an operator's differentiable arguments, and their values."""
    contract = CONTRACTS[operator]
    drawn = contract.draw({}, dtype=torch.float64)
    options = {option.name: option.default for option in contract.options}
    values = {each.name: drawn[each.name] for each in contract.arguments if each.differentiable}

    def loss(given):
        results = getattr(ms_kernels, operator)(**{**drawn, **given}, **options)
        results = results if isinstance(results, tuple) else (results,)
        return sum(each.square().sum() for each in results if each.is_floating_point())

    return loss, values


def gradients_of(loss, values):
    """Return the gradients that autograd finds."""
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    return dict(zip(leaves, torch.autograd.grad(loss(leaves), list(leaves.values())), strict=True))


@pytest.mark.parametrize("operator", DIFFERENTIABLE)
def test_transforms_give_the_gradients_of_autograd(operator):
    """torch.func.grad, its vmap, jvp, and forward-mode duals, of every operator in float64."""
    loss, values = losses_of(operator)
    truth = gradients_of(loss, values)
    generator = torch.Generator().manual_seed(0)
    directions = {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float64)
        for name, value in values.items()
    }
    slope = sum((truth[name] * directions[name]).sum() for name in values)

    found = torch.func.grad(loss)(values)
    stacked = {name: torch.stack((value, 2 * value)) for name, value in values.items()}
    samples = torch.func.vmap(torch.func.grad(loss))(stacked)
    _, along = torch.func.jvp(loss, (values,), (directions,))
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(value, directions[name]) for name, value in values.items()
        }
        dual = forward_ad.unpack_dual(loss(duals)).tangent

    # The same sums of float64, of up to 10,000 terms, in another order.
    close = {"rtol": 1e-9, "atol": 1e-9}
    doubled = gradients_of(loss, {name: 2 * value for name, value in values.items()})
    for name in values:
        torch.testing.assert_close(found[name], truth[name], **close)
        torch.testing.assert_close(samples[name][0], truth[name], **close)
        torch.testing.assert_close(samples[name][1], doubled[name], **close)
    torch.testing.assert_close(along, slope, **close)
    torch.testing.assert_close(dual, slope, **close)


@pytest.mark.parametrize("rows", [8, 4096])
def test_a_transform_does_not_depend_on_the_size(rows):
    """The CPU's own kernels pay from some size on; under torch.func they are never taken."""
    x, weight, pull = torch.randn(rows, 512), torch.ones(512), torch.randn(512)

    def loss(one):
        return (rms_norm(one, weight) * pull).sum()

    truth = gradients_of(lambda given: loss(given["x"]), {"x": x})["x"]
    # float32: sums of 512 terms of order one in another order.
    torch.testing.assert_close(torch.func.grad(loss)(x), truth, rtol=1e-5, atol=1e-5)
    per_sample = torch.func.vmap(torch.func.grad(loss))(x)
    torch.testing.assert_close(per_sample, truth, rtol=1e-5, atol=1e-5)


def test_a_backend_that_cannot_be_transformed_says_so_where_it_is_asked_for():
    """`use_backend` is not overruled in silence; the message names the reason."""
    x, weight = torch.randn(4096, 512), torch.ones(512)
    assert explain("rms_norm", x, weight).backend == "cpu"
    with use_backend("cpu"), pytest.raises(BackendError, match=r"opaque to torch\.func"):
        torch.func.grad(lambda one: rms_norm(one, weight).sum())(x)
    with use_backend("cpu", "reference"):
        assert torch.func.grad(lambda one: rms_norm(one, weight).sum())(x).shape == x.shape


def test_an_optimizer_step_can_be_vmapped():
    """Weights, gradient and moments of several models at once."""
    tensors = [torch.rand(3, 8, dtype=torch.float64) for _ in range(4)]
    alone = [each.clone() for each in tensors]
    for model in range(3):
        parts = [each[model] for each in alone]
        ms_kernels.adamw_step(*parts, step=1, learning_rate=0.1)

    def step(*parts):
        ms_kernels.adamw_step(*parts, step=1, learning_rate=0.1)
        return parts[0]

    torch.func.vmap(step)(*tensors)
    for together, one_by_one in zip(tensors, alone, strict=True):
        torch.testing.assert_close(together, one_by_one, rtol=1e-12, atol=1e-12)
