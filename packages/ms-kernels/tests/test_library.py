"""Opaque operators under torch's transformations: compile, fake tensors, checkpointing."""

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

OPERATORS = ["rms_norm", "add_rms_norm", "attention"]


def example(name, dtype=torch.float32, grad=True):
    """Return small arguments and options for the operator."""
    contract = CONTRACTS[name]
    sizes = {"...": 6, "H": 8} if "..." in contract.example else {"Sq": 5, "Sk": 7, "D": 4}
    tensors = list(contract.draw(sizes, dtype=dtype).values())
    for argument, tensor in zip(contract.arguments, tensors, strict=True):
        tensor.requires_grad_(grad and argument.differentiable)
    return [*tensors, *contract.defaults]


def grads_of(result, leaves):
    """Return gradients of all results, each with different output gradients."""
    results = result if isinstance(result, tuple) else (result,)
    grad_outputs = [torch.linspace(-1, 1, part.numel()).view(part.shape) for part in results]
    return torch.autograd.grad(results, leaves, grad_outputs)


def leaves_of(arguments):
    """Return the arguments that require a gradient."""
    return [arg for arg in arguments if isinstance(arg, torch.Tensor) and arg.requires_grad]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_opaque_operator_computes_its_functions(name):
    """Results and gradients are within the contract's tolerance."""
    contract = CONTRACTS[name]
    tensors = list(contract.draw({}).values())
    run = getattr(opaque_operators, name)
    for part, ratio in compare(contract, run, tensors, contract.defaults):
        assert ratio <= 1, part


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck_passes(name):
    """Schema, autograd registration, fakes and AOT dispatch."""
    operator = getattr(torch.ops.ms_kernels, f"{name}_numpy").default
    arguments = example(name)
    torch.library.opcheck(operator, tuple(arguments))
    if name == "attention":
        arguments[3] = None
        torch.library.opcheck(operator, tuple(arguments))


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_opcheck_passes_for_the_backward_operator(name):
    """The backward pass is a separate operator; gradients marked absent_grad are empty."""
    backward = getattr(torch.ops.ms_kernels, f"{name}_numpy_backward").default
    x, weight = torch.randn(6, 8), torch.randn(8)
    saved = (x, weight, torch.rand(6)) if name == "rms_norm" else (None, x, weight, torch.rand(6))
    for grad_mask in range(4):
        torch.library.opcheck(
            backward,
            (torch.randn(6, 8), *saved, grad_mask, 1e-6),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize("name", OPERATORS)
def test_torch_compile_makes_one_graph_forward_and_backward(name):
    """fullgraph, with dynamic shapes after the first call, and unchanged results and gradients."""
    run = getattr(opaque_operators, name)
    compiled = torch.compile(lambda *args: run(*args), fullgraph=True, backend="aot_eager")
    for rows in (3, 4, 5):
        outputs = []
        for function in (compiled, run):
            arguments = example(name)
            if name != "attention":
                arguments = [
                    arg[:rows].detach().requires_grad_(arg.requires_grad)
                    if isinstance(arg, torch.Tensor) and arg.shape[0] == 6
                    else arg
                    for arg in arguments
                ]
            result = function(*arguments)
            results = result if isinstance(result, tuple) else (result,)
            outputs.append([*results, *grads_of(result, leaves_of(arguments))])
        torch.testing.assert_close(*outputs)


def test_inductor_calls_the_opaque_operator():
    """The default backend calls the operator between the kernels it fuses."""
    x, weight, eps = example("rms_norm")

    def block(x):
        return opaque_operators.rms_norm(x * 2, weight, eps).sin()

    compiled = torch.compile(block, fullgraph=True)
    torch.testing.assert_close(compiled(x), block(x))
    torch.testing.assert_close(grads_of(compiled(x), [x]), grads_of(block(x), [x]))


def test_fake_tensors_pass_through():
    """Shapes without data, forward and backward; numpy would fail on them."""
    with FakeTensorMode():
        x, weight = torch.empty(6, 8, requires_grad=True), torch.empty(8, requires_grad=True)
        normed, summed = opaque_operators.add_rms_norm(x, x, weight, 1e-6)
        assert normed.shape == summed.shape == (6, 8)
        grads = torch.autograd.grad((normed, summed), (x, weight), (normed, summed))
        assert [grad.shape for grad in grads] == [(6, 8), (8,)]


@pytest.mark.parametrize("name", OPERATORS)
def test_activation_checkpointing_gives_the_same_gradients(name):
    """The forward pass runs again in backward and returns the same bits."""
    run = getattr(opaque_operators, name)
    arguments = example(name)
    leaves = leaves_of(arguments)
    plain = grads_of(run(*arguments), leaves)
    recomputed = grads_of(checkpoint(run, *arguments, use_reentrant=False), leaves)
    torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)


def test_selective_checkpointing_can_save_the_results():
    """The policy sees the operator by name and can avoid recomputing it."""
    policy_calls = []
    operator = torch.ops.ms_kernels.rms_norm_numpy.default

    def policy(ctx, function, *args, **kwargs):
        policy_calls.append((function, ctx.is_recompute))
        return (
            CheckpointPolicy.MUST_SAVE if function is operator else CheckpointPolicy.MUST_RECOMPUTE
        )

    arguments = example("rms_norm")
    leaves = leaves_of(arguments)
    plain = grads_of(opaque_operators.rms_norm(*arguments), leaves)
    result = checkpoint(
        opaque_operators.rms_norm,
        *arguments,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, policy),
    )
    torch.testing.assert_close(grads_of(result, leaves), plain, rtol=0, atol=0)
    assert (operator, False) in policy_calls


def test_direct_and_dispatched_calls_agree_bitwise():
    """Plain tensors bypass the dispatcher; results and gradients are the same bits."""
    for name in OPERATORS:
        arguments = example(name)
        leaves = leaves_of(arguments)
        direct = getattr(opaque_operators, name)(*arguments)
        dispatched = getattr(torch.ops.ms_kernels, f"{name}_numpy")(*arguments)
        if isinstance(dispatched, tuple):
            dispatched = dispatched[: len(CONTRACTS[name].results)]
            dispatched = dispatched if len(dispatched) > 1 else dispatched[0]
        torch.testing.assert_close(direct, dispatched, rtol=0, atol=0)
        direct_grads, dispatched_grads = grads_of(direct, leaves), grads_of(dispatched, leaves)
        torch.testing.assert_close(direct_grads, dispatched_grads, rtol=0, atol=0)


def test_only_required_gradients_are_computed():
    """A frozen weight gets no gradient, and an unused result passes None instead of zeros."""
    x, residual, weight, eps = example("add_rms_norm")
    weight = weight.detach()
    normed, summed = opaque_operators.add_rms_norm(x, residual, weight, eps)
    assert torch.equal(torch.autograd.grad(summed.sum(), x, retain_graph=True)[0], torch.ones(6, 8))
    (grad,) = torch.autograd.grad(normed.sum(), residual)
    x_copy = x.detach().requires_grad_()
    expected = CONTRACTS["add_rms_norm"].reference(x_copy, residual.detach(), weight, eps)[0]
    # Sums of 8 terms in float32.
    torch.testing.assert_close(
        grad, torch.autograd.grad(expected.sum(), x_copy)[0], rtol=1e-5, atol=1e-6
    )


def test_double_backward_is_refused():
    """A second derivative would be silently wrong, so it is an error."""
    x, weight, eps = example("rms_norm")
    result = opaque_operators.rms_norm(x, weight, eps)
    (grad,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
