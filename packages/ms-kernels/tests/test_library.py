"""Opaque operators under everything that torch does with operators."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ms_kernels.checking import compare
from ms_kernels.operators import CONTRACTS

from . import opaque_operators

OPERATORS = ["rms_norm", "add_rms_norm", "attention", "adamw_step"]
DIFFERENTIABLE = OPERATORS[:3]


def example(name, dtype=torch.float32, grad=True):
    """Return the operator's arguments and options, small."""
    contract = CONTRACTS[name]
    sizes = {"...": 6, "H": 8} if "..." in contract.example else {"Sq": 5, "Sk": 7, "D": 4}
    tensors = list(contract.draw(sizes, dtype=dtype).values())
    for argument, tensor in zip(contract.arguments, tensors, strict=True):
        tensor.requires_grad_(grad and argument.differentiable)
    return [*tensors, *contract.defaults]


def pulled(result, leaves):
    """Return gradients of all results, each pulled by its own numbers."""
    results = result if isinstance(result, tuple) else (result,)
    pulls = [torch.linspace(-1, 1, each.numel()).view(each.shape) for each in results]
    return torch.autograd.grad(results, leaves, pulls)


def leaves_of(arguments):
    """Return what wants a gradient."""
    return [each for each in arguments if isinstance(each, torch.Tensor) and each.requires_grad]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_opaque_operator_computes_what_its_functions_do(name):
    """Results and gradients lie within the contract's tolerance."""
    contract = CONTRACTS[name]
    tensors = list(contract.draw({}).values())
    run = getattr(opaque_operators, name)
    for part, share in compare(contract, run, tensors, contract.defaults):
        assert share <= 1, part


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck_holds(name):
    """Schema, autograd registration, fakes and AOT dispatch are as torch wants them."""
    operator = getattr(torch.ops.ms_kernels, f"{name}_numpy").default
    arguments = example(name, grad=name in DIFFERENTIABLE)
    torch.library.opcheck(operator, tuple(arguments))
    if name == "attention":
        arguments[3] = None
        torch.library.opcheck(operator, tuple(arguments))


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_opcheck_holds_for_the_backward_pass(name):
    """It is an operator of its own; absent_grad gradients are empty."""
    backward = getattr(torch.ops.ms_kernels, f"{name}_numpy_backward").default
    x, weight = torch.randn(6, 8), torch.randn(8)
    given = (x, weight, torch.rand(6)) if name == "rms_norm" else (None, x, weight, torch.rand(6))
    for grad_mask in range(4):
        torch.library.opcheck(
            backward,
            (torch.randn(6, 8), *given, grad_mask, 1e-6),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize("name", OPERATORS)
def test_torch_compile_makes_one_graph_forward_and_backward(name):
    """fullgraph, with dynamic shapes after the first, results and gradients unchanged."""
    run = getattr(opaque_operators, name)
    compiled = torch.compile(lambda *given: run(*given), fullgraph=True, backend="aot_eager")
    for rows in (3, 4, 5):
        answers = []
        for function in (compiled, run):
            arguments = example(name, grad=name in DIFFERENTIABLE)
            if name != "attention":
                arguments = [
                    each[:rows].detach().requires_grad_(each.requires_grad)
                    if isinstance(each, torch.Tensor) and each.shape[0] == 6
                    else each
                    for each in arguments
                ]
            result = function(*arguments)
            if name == "adamw_step":
                answers.append(arguments[:4])
            else:
                results = result if isinstance(result, tuple) else (result,)
                answers.append([*results, *pulled(result, leaves_of(arguments))])
        torch.testing.assert_close(*answers)


def test_inductor_leaves_it_as_it_is():
    """The default backend calls the operator too, among what it fuses."""
    x, weight, eps = example("rms_norm")

    def block(x):
        return opaque_operators.rms_norm(x * 2, weight, eps).sin()

    compiled = torch.compile(block, fullgraph=True)
    torch.testing.assert_close(compiled(x), block(x))
    torch.testing.assert_close(pulled(compiled(x), [x]), pulled(block(x), [x]))


def test_fake_tensors_pass_through():
    """Shapes without data, forward and backward: numpy would fail on them."""
    with FakeTensorMode():
        x, weight = torch.empty(6, 8, requires_grad=True), torch.empty(8, requires_grad=True)
        normed, summed = opaque_operators.add_rms_norm(x, x, weight, 1e-6)
        assert normed.shape == summed.shape == (6, 8)
        grads = torch.autograd.grad((normed, summed), (x, weight), (normed, summed))
        assert [each.shape for each in grads] == [(6, 8), (8,)]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_block_may_be_recomputed(name):
    """Activation checkpointing runs it again and gives the same gradients."""
    run = getattr(opaque_operators, name)
    arguments = example(name)
    leaves = leaves_of(arguments)
    plain = pulled(run(*arguments), leaves)
    again = pulled(checkpoint(run, *arguments, use_reentrant=False), leaves)
    torch.testing.assert_close(again, plain, rtol=0, atol=0)


def test_a_selective_recompute_may_keep_its_results():
    """A policy sees the operator by name, and spares running it again."""
    seen = []
    operator = torch.ops.ms_kernels.rms_norm_numpy.default

    def policy(ctx, function, *given, **named):
        seen.append((function, ctx.is_recompute))
        return (
            CheckpointPolicy.MUST_SAVE if function is operator else CheckpointPolicy.MUST_RECOMPUTE
        )

    arguments = example("rms_norm")
    leaves = leaves_of(arguments)
    plain = pulled(opaque_operators.rms_norm(*arguments), leaves)
    result = checkpoint(
        opaque_operators.rms_norm,
        *arguments,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, policy),
    )
    torch.testing.assert_close(pulled(result, leaves), plain, rtol=0, atol=0)
    assert (operator, False) in seen


def test_plain_tensors_take_the_short_way_with_the_same_answer():
    """Called directly or through the dispatcher, results and gradients are the same bits."""
    for name in DIFFERENTIABLE:
        arguments = example(name)
        leaves = leaves_of(arguments)
        direct = getattr(opaque_operators, name)(*arguments)
        dispatched = getattr(torch.ops.ms_kernels, f"{name}_numpy")(*arguments)
        if isinstance(dispatched, tuple):
            dispatched = dispatched[: len(CONTRACTS[name].results)]
            dispatched = dispatched if len(dispatched) > 1 else dispatched[0]
        torch.testing.assert_close(direct, dispatched, rtol=0, atol=0)
        got, truth = pulled(direct, leaves), pulled(dispatched, leaves)
        torch.testing.assert_close(got, truth, rtol=0, atol=0)


def test_only_what_is_wanted_is_made():
    """A frozen weight has no gradient; a result that nothing flowed into is None, not zeros."""
    x, residual, weight, eps = example("add_rms_norm")
    weight = weight.detach()
    normed, summed = opaque_operators.add_rms_norm(x, residual, weight, eps)
    assert torch.equal(torch.autograd.grad(summed.sum(), x, retain_graph=True)[0], torch.ones(6, 8))
    (got,) = torch.autograd.grad(normed.sum(), residual)
    twin = x.detach().requires_grad_()
    truth = CONTRACTS["add_rms_norm"].reference(twin, residual.detach(), weight, eps)[0]
    # Sums of 8 terms in float32.
    torch.testing.assert_close(got, torch.autograd.grad(truth.sum(), twin)[0], rtol=1e-5, atol=1e-6)


def test_it_refuses_to_be_differentiated_twice():
    """A gradient of a gradient would be wrong in silence; it is an error."""
    x, weight, eps = example("rms_norm")
    result = opaque_operators.rms_norm(x, weight, eps)
    (grad,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_what_is_written_in_place_is_a_new_version():
    """Autograd must see that a tensor it saved was changed."""
    weights, gradient, mean, square, *options = example("adamw_step", grad=False)
    before = weights._version
    opaque_operators.adamw_step(weights, gradient, mean, square, *options)
    assert weights._version > before
    assert gradient._version == 0
