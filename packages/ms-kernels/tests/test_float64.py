"""A float64 call has no narrower intermediate, forward or backward.

A bool or integer tensor times a Python float, and a tensor created without a dtype, have torch's
default dtype, float32: the gradient then has eight correct digits instead of sixteen.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ms_kernels.checking import compare
from ms_kernels.contracts.call import ACCUMULATED, FLOATING
from ms_kernels.core.choice import obstacle_to
from ms_kernels.core.dispatch import describe_call
from ms_kernels.operators import CONTRACTS

from .test_operators import CPU_IMPLEMENTATIONS, IMPLEMENTATION_IDS, draw_arguments

FLOAT64_IMPLEMENTATIONS = [
    pytest.param(impl, id=impl_id)
    for impl, impl_id in zip(CPU_IMPLEMENTATIONS, IMPLEMENTATION_IDS, strict=True)
    if impl.dtypes is None or torch.float64 in impl.dtypes
]


class NarrowTensors(TorchDispatchMode):
    """Records each operation that returns a floating-point tensor narrower than float64."""

    def __init__(self):
        super().__init__()
        self.narrow = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.dtype in (
                torch.float32,
                torch.bfloat16,
                torch.float16,
            ):
                self.narrow.append(f"{function} made {leaf.dtype} {tuple(leaf.shape)}")
        return result


def run(contract, implementation, tensors, options):
    """Run a call and its backward pass, if it has one, on copies."""
    inputs = [
        tensor
        if tensor is None
        else tensor.detach().clone().requires_grad_(argument.differentiable)
        for argument, tensor in zip(contract.arguments, tensors, strict=True)
    ]
    output = implementation.run(*inputs, *options)
    results = output if isinstance(output, tuple) else (output,)
    differentiable = [result for result in results if result is not None and result.requires_grad]
    if differentiable:
        torch.autograd.backward(
            differentiable, [torch.ones_like(result) for result in differentiable]
        )


@pytest.mark.parametrize("implementation", FLOAT64_IMPLEMENTATIONS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_float64_calls_have_no_narrower_intermediates(implementation, data):
    """Every operation of every backend, with every option, forward and backward."""
    contract = CONTRACTS[implementation.operator]
    tensors, options = draw_arguments(data, contract, torch.float64)
    if obstacle_to(implementation, describe_call(contract, tuple(tensors), options)):
        return
    with NarrowTensors() as recorder:
        run(contract, implementation, tensors, options)
    assert recorder.narrow == []


@pytest.mark.parametrize("implementation", FLOAT64_IMPLEMENTATIONS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_narrower_weights_do_not_narrow_a_float64_call(implementation, data):
    """Weights, scales and tables of narrower dtypes convert exactly, so the results are float64."""
    contract = CONTRACTS[implementation.operator]
    tensors, options = draw_arguments(data, contract, torch.float64)
    narrowed = []
    for argument, tensor in zip(contract.arguments, tensors, strict=True):
        own_dtype = argument.like is None and argument is not contract.arguments[0]
        if tensor is not None and own_dtype and tensor.is_floating_point():
            dtype = data.draw(st.sampled_from([d for d in FLOATING if d in argument.dtypes]))
            tensor = tensor.to(dtype)
        elif tensor is not None and argument.like is not None:
            like_index = [arg.name for arg in contract.arguments].index(argument.like)
            tensor = (
                tensor if narrowed[like_index] is None else tensor.to(narrowed[like_index].dtype)
            )
        narrowed.append(tensor)
    if obstacle_to(implementation, describe_call(contract, tuple(narrowed), options)):
        return
    for part, ratio in compare(contract, implementation.run, narrowed, options):
        name = part.removeprefix("gradient of ")
        dtypes = [
            tensor.dtype
            for argument, tensor in zip(contract.arguments, narrowed, strict=True)
            if argument.name == name
        ]
        if dtypes in ([], [torch.float64]):  # a narrower weight's gradient has the weight's dtype
            assert ratio <= 1, f"{part} is off by {ratio:.3g} times the tolerance"


def plain_loss(hidden, weight, targets, ignore_index, smoothing, z_loss, reduction):
    """Linear cross entropy from torch's own functions, differentiated by autograd."""
    logits = hidden @ weight.T
    losses = F.cross_entropy(
        logits, targets, ignore_index=ignore_index, label_smoothing=smoothing, reduction="none"
    )
    valid = targets != ignore_index
    losses = losses + z_loss * logits.logsumexp(-1).square() * valid
    if reduction == "none":
        return losses
    return losses.sum() / (max(int(valid.sum()), 1) if reduction == "mean" else 1)


def plain_log_probs(hidden, weight, tokens, temperature, ignore_index, entropy):
    """Token log-probabilities from torch's own functions."""
    log_probs = (hidden @ weight.T / temperature).log_softmax(-1)
    valid = tokens != ignore_index
    token_log_probs = (
        log_probs.gather(-1, tokens.masked_fill(~valid, 0).unsqueeze(-1)).squeeze(-1) * valid
    )
    return (
        (token_log_probs, -(log_probs.exp() * log_probs).sum(-1) * valid)
        if entropy
        else token_log_probs
    )


PLAIN = {
    "linear_cross_entropy": plain_loss,
    "token_log_probs": plain_log_probs,
}
"""Plain versions of the operators whose reference has a hand-written gradient."""
HAND_WRITTEN = [impl for impl in FLOAT64_IMPLEMENTATIONS if impl.values[0].operator in PLAIN]


@pytest.mark.parametrize("implementation", HAND_WRITTEN)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_hand_written_gradients_equal_autograd(implementation, data):
    """They match torch's own functions in float64 to 1e-11, as the contract promises."""
    contract = CONTRACTS[implementation.operator]
    tensors, options = draw_arguments(data, contract, torch.float64)
    if obstacle_to(implementation, describe_call(contract, tuple(tensors), options)):
        return
    outputs = []
    for function in (implementation.run, PLAIN[contract.name]):
        leaves = [
            tensor
            if tensor is None
            else tensor.detach().clone().requires_grad_(argument.differentiable)
            for argument, tensor in zip(contract.arguments, tensors, strict=True)
        ]
        output = function(*leaves, *options)
        results = output if isinstance(output, tuple) else (output,)
        grad_outputs = [
            torch.linspace(0.5, 2, result.numel()).view_as(result).to(result) for result in results
        ]
        torch.autograd.backward(results, grad_outputs)
        grads = [leaf.grad for leaf in leaves if leaf is not None and leaf.requires_grad]
        outputs.append([*results, *grads])
    for actual, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def test_every_hand_written_gradient_is_tested():
    """Every operator whose reference is an autograd function has a plain version here."""
    hand_written = {
        name
        for name, contract in CONTRACTS.items()
        if any(
            isinstance(value, type) and issubclass(value, torch.autograd.Function)
            for value in contract.reference.__globals__.values()
        )
    }
    assert hand_written == set(PLAIN)
    assert ACCUMULATED[-1] == torch.float64
