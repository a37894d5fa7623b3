"""A float64 call is float64 throughout: no intermediate number, forward or backward, is narrower.

A bool or a whole number times a Python float, and a tensor made without a dtype, are of torch's
default dtype, float32: a gradient then has eight digits where sixteen were asked for.
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
from ms_kernels.packed_weights import dequantize

from .test_operators import HERE, IDENTITIES, arguments_of

TAKING = [
    pytest.param(each, id=identity)
    for each, identity in zip(HERE, IDENTITIES, strict=True)
    if each.dtypes is None or torch.float64 in each.dtypes
]


class Narrower(TorchDispatchMode):
    """Notes each operation that makes a floating tensor narrower than float64."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.dtype in (
                torch.float32,
                torch.bfloat16,
                torch.float16,
            ):
                self.found.append(f"{function} made {each.dtype} {tuple(each.shape)}")
        return result


def run(contract, implementation, tensors, options):
    """Perform a call and its backward pass, if it has one, on copies."""
    given = [
        each if each is None else each.detach().clone().requires_grad_(argument.differentiable)
        for argument, each in zip(contract.arguments, tensors, strict=True)
    ]
    found = implementation.run(*given, *options)
    results = found if isinstance(found, tuple) else (found,)
    slopes = [each for each in results if each is not None and each.requires_grad]
    if slopes:
        torch.autograd.backward(slopes, [torch.ones_like(each) for each in slopes])


@pytest.mark.parametrize("implementation", TAKING)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_no_number_of_a_float64_call_is_narrower(implementation, data):
    """Every operation of every backend, with every option, forward and backward, gives float64."""
    contract = CONTRACTS[implementation.operator]
    tensors, options = arguments_of(data, contract, torch.float64)
    if obstacle_to(implementation, describe_call(contract, tuple(tensors), options)):
        return
    with Narrower() as narrower:
        run(contract, implementation, tensors, options)
    found = narrower.found
    if (implementation.operator, implementation.backend) == ("adamw_step", "cpu"):
        # torch's fused kernel counts steps in float32, exactly up to 2^24.
        found = [each for each in found if not each.endswith("float32 ()")]
    assert found == []


@pytest.mark.parametrize("implementation", TAKING)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_narrower_weights_do_not_narrow_a_float64_call(implementation, data):
    """Weights, scales and tables of other dtypes are exact in float64, and so is what follows."""
    contract = CONTRACTS[implementation.operator]
    if contract.mutates:
        return  # it computes in the moments' dtype, and says so
    tensors, options = arguments_of(data, contract, torch.float64)
    narrowed = []
    for argument, each in zip(contract.arguments, tensors, strict=True):
        free = argument.like is None and argument is not contract.arguments[0]
        if each is not None and free and each.is_floating_point():
            dtype = data.draw(st.sampled_from([it for it in FLOATING if it in argument.dtypes]))
            each = each.to(dtype)
        elif each is not None and argument.like is not None:
            model = [other.name for other in contract.arguments].index(argument.like)
            each = each if narrowed[model] is None else each.to(narrowed[model].dtype)
        narrowed.append(each)
    if obstacle_to(implementation, describe_call(contract, tuple(narrowed), options)):
        return
    for part, share in compare(contract, implementation.run, narrowed, options):
        name = part.removeprefix("gradient of ")
        own = [
            each.dtype
            for argument, each in zip(contract.arguments, narrowed, strict=True)
            if argument.name == name
        ]
        if own in ([], [torch.float64]):  # a gradient of a narrower weight is as narrow as it
            assert share <= 1, f"{part} is off by {share:.3g} times the tolerance"


def plain_loss(hidden, weight, targets, ignore_index, smoothing, z_loss, reduction):
    """Return linear_cross_entropy by torch's own functions, to be differentiated by autograd."""
    logits = hidden @ weight.T
    losses = F.cross_entropy(
        logits, targets, ignore_index=ignore_index, label_smoothing=smoothing, reduction="none"
    )
    counted = targets != ignore_index
    losses = losses + z_loss * logits.logsumexp(-1).square() * counted
    if reduction == "none":
        return losses
    return losses.sum() / (max(int(counted.sum()), 1) if reduction == "mean" else 1)


def plain_chosen(hidden, weight, tokens, temperature, ignore_index, entropy):
    """Return token_log_probs by torch's own functions."""
    shares = (hidden @ weight.T / temperature).log_softmax(-1)
    counted = tokens != ignore_index
    picked = shares.gather(-1, tokens.masked_fill(~counted, 0).unsqueeze(-1)).squeeze(-1) * counted
    return (picked, -(shares.exp() * shares).sum(-1) * counted) if entropy else picked


def plain_quantized(x, packed, scales, zeros, bits, group_size):
    """Return quantized_linear by a plain product."""
    return x @ dequantize(packed, scales, zeros, bits=bits, group_size=group_size).T


PLAIN = {
    "linear_cross_entropy": plain_loss,
    "token_log_probs": plain_chosen,
    "quantized_linear": plain_quantized,
}
"""Plain functions of the operators whose reference writes its gradient itself."""
WRITTEN = [each for each in TAKING if each.values[0].operator in PLAIN]


@pytest.mark.parametrize("implementation", WRITTEN)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_gradients_written_by_hand_equal_autograd_to_the_last_digits(implementation, data):
    """They agree with torch's own functions in float64 to 1e-11, which the contract promises."""
    contract = CONTRACTS[implementation.operator]
    tensors, options = arguments_of(data, contract, torch.float64)
    if obstacle_to(implementation, describe_call(contract, tuple(tensors), options)):
        return
    answers = []
    for function in (implementation.run, PLAIN[contract.name]):
        leaves = [
            each if each is None else each.detach().clone().requires_grad_(argument.differentiable)
            for argument, each in zip(contract.arguments, tensors, strict=True)
        ]
        found = function(*leaves, *options)
        results = found if isinstance(found, tuple) else (found,)
        pulls = [torch.linspace(0.5, 2, each.numel()).view_as(each).to(each) for each in results]
        torch.autograd.backward(results, pulls)
        slopes = [each.grad for each in leaves if each is not None and each.requires_grad]
        answers.append([*results, *slopes])
    for got, truth in zip(*answers, strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-11, atol=1e-11)


def test_every_operator_with_a_gradient_of_its_own_is_tried():
    """An operator whose reference is an autograd function has a plain one here."""
    own = {
        name
        for name, contract in CONTRACTS.items()
        if any(
            isinstance(each, type) and issubclass(each, torch.autograd.Function)
            for each in contract.reference.__globals__.values()
        )
    }
    assert own == set(PLAIN)
    assert ACCUMULATED[-1] == torch.float64
