"""Gradients of every implementation against finite differences, in float64."""

import pytest
import torch

from ms_kernels.core.choice import obstacle_to
from ms_kernels.core.dispatch import describe_call
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS

SMALL = {
    "rms_norm": {"...": 3, "H": 5},
    "rotary": {"B": 2, "C": 2, "S": 3, "Hq": 2, "Hk": 1, "D": 7, "R/2": 2},
    "swiglu": {"...": 3, "I": 5},
    "attention": {"B": 1, "Sq": 3, "Sk": 5, "Hq": 4, "Hk": 2, "D": 3, "Dv": 2},
    "cross_entropy": {"...": 5, "V": 7},
    "linear_cross_entropy": {"...": 5, "H": 3, "V": 7},
    "add_rms_norm": {"...": 3, "H": 5},
    "layer_norm": {"...": 3, "H": 5},
    "geglu": {"...": 3, "I": 5},
    "token_log_probs": {"...": 5, "H": 3, "V": 7},
    "permute_tokens": {"T": 4, "C": 2, "H": 3},
    "unpermute_tokens": {"R": 8, "T": 4, "C": 2, "H": 3},
    "grouped_matmul": {"T": 5, "E": 3, "K": 3, "N": 2},
    "causal_conv1d": {"B": 2, "S": 5, "C": 2, "K": 3},
    "gated_delta_rule": {"B": 1, "S": 9, "Hk": 1, "Hv": 2, "D": 3, "Dv": 2},
}
OPTIONS = {
    "rms_norm": [(1e-6,), (0.5,)],
    "rotary": [(False,), (True,)],
    "swiglu": [()],
    "attention": [(True, None, None), (False, 2, 0.3), (True, 2, None)],
    "cross_entropy": [(-100, 0.1, 0.02, r) for r in ("mean", "sum", "none")],
    "linear_cross_entropy": [(-100, 0.1, 0.02, r) for r in ("mean", "sum", "none")],
    "add_rms_norm": [(1e-6,), (0.5,)],
    "layer_norm": [(1e-5,), (0.5,)],
    "geglu": [("none",), ("tanh",)],
    "token_log_probs": [(1.0, -100, False), (2.0, -100, True)],
    "permute_tokens": [(4,)],
    "unpermute_tokens": [()],
    "grouped_matmul": [()],
    "causal_conv1d": [(False, False), (True, True)],
    "gated_delta_rule": [(None, False, False), (0.3, True, True)],
}
CASES = [
    pytest.param(impl, options, id=f"{impl.operator}-{impl.backend}-{options}")
    for impl in IMPLEMENTATIONS
    if impl.devices is None or "cpu" in impl.devices
    for options in OPTIONS.get(impl.operator, ())  # empty for operators without a gradient
]


@pytest.mark.parametrize(("implementation", "options"), CASES)
def test_gradients_equal_finite_differences(implementation, options):
    """Gradcheck in float64 passes for every implementation."""
    contract = CONTRACTS[implementation.operator]
    example = contract.draw(SMALL[contract.name], dtype=torch.float64)
    call = describe_call(contract, tuple(example.values()), options)
    obstacle = obstacle_to(implementation, call)
    if obstacle is not None:
        pytest.skip(obstacle)
    tensors = [
        tensor.requires_grad_(argument.differentiable)
        for argument, tensor in zip(contract.arguments, example.values(), strict=True)
    ]
    assert torch.autograd.gradcheck(lambda *args: implementation.run(*args, *options), tensors)
