"""Every adapter against the contract, with its calls computed by the null runtime."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_kernels.checking import compare
from ms_kernels.core.choice import obstacle_to
from ms_kernels.core.dispatch import describe_call
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS

from ..test_operators import draw_arguments

ADAPTERS = [impl for impl in IMPLEMENTATIONS if impl.backend == "ascend"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPERATORS = [impl.operator for impl in ADAPTERS]
SUPPORTED_SIZES = {name: {"V": (128, 200)} for name in ("linear_cross_entropy", "token_log_probs")}
"""Sizes that the adapters support, where most random sizes would be refused."""


def to_npu(tensor):
    """Move to the NPU, keeping the strides."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if not tensor.numel():
        return tensor.to("npu")
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((span,), (1,)).to("npu")
    return flat.as_strided(tensor.shape, tensor.stride())


def on_npu(implementation):
    """Return its `run` for CPU tensors."""

    def run(*tensors):
        output = implementation.run(*[to_npu(tensor) for tensor in tensors])
        return tuple(x.cpu() for x in output) if isinstance(output, tuple) else output.cpu()

    return run


def expected_contract(contract, dtype):
    """Return the contract for `compare`, adjusted to the rounding of CANN's kernel.

    CANN's kernel rounds logits to half precision before the softmax. Logits are of order sqrt(H)
    for hidden and weight of order one, so rounding them moves the loss by more than its tolerance.
    The reference of such a loss therefore starts from the same rounded logits.
    """
    if contract.name != "linear_cross_entropy":
        return contract

    def reference(hidden, weight, *args):
        exact = hidden @ weight.T
        float32_logits = hidden.float() @ weight.float().T
        rounded = float32_logits.to(dtype).double()
        return CONTRACTS["cross_entropy"].reference(exact + (rounded - exact).detach(), *args)

    fields = {name: getattr(contract, name) for name in ("arguments", "tolerance")}
    return SimpleNamespace(**fields, reference=reference)


@pytest.mark.parametrize("implementation", ADAPTERS, ids=OPERATORS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_adapter_equals_the_reference_in_float64(implementation, data):
    """Results and gradients are within the contract's tolerance, for odd sizes and strides.

    Refused calls are not run: the real kernels would refuse them or return undefined results.
    """
    contract = CONTRACTS[implementation.operator]
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    tensors, options = draw_arguments(data, contract, dtype, SUPPORTED_SIZES.get(contract.name))
    if options[-1:] == ("mean",) and not (tensors[-1] != -100).any():
        options = (*options[:-1], "sum")
    moved = tuple(t if t is None else to_npu(t) for t in tensors)
    call = describe_call(contract, moved, options)
    contract.bind(call)
    if obstacle_to(implementation, call) is not None:
        return
    expected = expected_contract(contract, dtype)
    for part, ratio in compare(expected, on_npu(implementation), tensors, options):
        assert ratio <= 1, f"{part} is off by {ratio:.3g} times the tolerance"


def test_half_precision_rows_accept_float32_weights():
    """Router weights and their gradient are not rounded to the rows' dtype."""
    contract = CONTRACTS["unpermute_tokens"]
    (adapter,) = [impl for impl in ADAPTERS if impl.operator == contract.name]
    rows, places, weights = contract.draw({}, dtype=torch.bfloat16).values()
    for part, ratio in compare(contract, on_npu(adapter), (rows, places, weights.float()), ()):
        assert ratio <= 1, f"{part} is off by {ratio:.3g} times the tolerance"


def test_interleaved_rotary_splits_many_rows_and_heads():
    """CANN accepts fewer than 1,000 rows times heads; DeepSeek-V3 has 8 rows of 128 heads."""
    contract = CONTRACTS["rotary"]
    (adapter,) = [impl for impl in ADAPTERS if impl.operator == contract.name]
    for tables in (1, 8):
        sizes = {"B": 8, "C": tables, "S": 3, "Hq": 128, "Hk": 1, "D": 4, "R/2": 2}
        tensors = tuple(contract.draw(sizes, dtype=torch.float32).values())
        for part, ratio in compare(contract, on_npu(adapter), tensors, (True,)):
            assert ratio <= 1, f"{part} is off by {ratio:.3g} times the tolerance"
