"""Every adapter against the contract, its calls performed by the null runtime."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_kernels.checking import compare
from ms_kernels.core.choice import obstacle_to
from ms_kernels.core.dispatch import describe_call
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS

from ..test_operators import arguments_of

ADAPTERS = [each for each in IMPLEMENTATIONS if each.backend == "ascend"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPERATORS = [each.operator for each in ADAPTERS]
TAKEN = {name: {"V": (128, 200)} for name in ("linear_cross_entropy", "token_log_probs")}
"""Sizes that adapters take, where most that are drawn would be refused."""


def there(tensor):
    """Move to the NPU under the same strides."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if not tensor.numel():
        return tensor.to("npu")
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((span,), (1,)).to("npu")
    return flat.as_strided(tensor.shape, tensor.stride())


def on_the_npu(implementation):
    """Return its `run` for tensors on the CPU."""
    mutates = CONTRACTS[implementation.operator].mutates

    def run(*given):
        moved = [there(each) for each in given]
        output = implementation.run(*moved)
        if mutates:
            for mine, theirs in zip(given, moved, strict=True):
                if isinstance(mine, torch.Tensor):
                    mine.copy_(theirs.cpu())
            return None
        return tuple(x.cpu() for x in output) if isinstance(output, tuple) else output.cpu()

    return run


def truth_of(contract, dtype):
    """Return what a contract tells `compare`, with the truth for what its adapter computes.

    CANN's kernel rounds logits to half precision before the softmax, as the adapter's module says,
    and logits of hidden and weight of order one are of order sqrt(H): rounded, they move the loss
    by more than its tolerance. So the truth of such a loss begins with the same rounded logits.
    """
    if contract.name != "linear_cross_entropy":
        return contract

    def reference(hidden, weight, *rest):
        exact = hidden @ weight.T
        single = hidden.float() @ weight.float().T
        rounded = single.to(dtype).double()
        return CONTRACTS["cross_entropy"].reference(exact + (rounded - exact).detach(), *rest)

    held = {name: getattr(contract, name) for name in ("arguments", "mutates", "tolerance")}
    return SimpleNamespace(**held, reference=reference)


@pytest.mark.parametrize("implementation", ADAPTERS, ids=OPERATORS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_adapter_equals_the_reference_in_float64(implementation, data):
    """Results and gradients lie within the contract's tolerance, on odd sizes and strides.

    What an adapter refuses is not run: the real kernels would refuse it too, or leave it undefined.
    """
    contract = CONTRACTS[implementation.operator]
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    tensors, options = arguments_of(data, contract, dtype, TAKEN.get(contract.name))
    if options[-1:] == ("mean",) and not (tensors[-1] != -100).any():
        options = (*options[:-1], "sum")
    moved = tuple(each if each is None else there(each) for each in tensors)
    call = describe_call(contract, moved, options)
    contract.bind(call)
    if obstacle_to(implementation, call) is not None:
        return
    truth = truth_of(contract, dtype)
    for part, share in compare(truth, on_the_npu(implementation), tensors, options):
        assert share <= 1, f"{part} is off by {share:.3g} times the tolerance"


def test_rows_in_half_precision_are_weighed_in_float32():
    """A router's weights need no rounding to the rows' dtype; nor does their gradient."""
    contract = CONTRACTS["unpermute_tokens"]
    (adapter,) = [each for each in ADAPTERS if each.operator == contract.name]
    rows, places, weights = contract.draw({}, dtype=torch.bfloat16).values()
    for part, share in compare(contract, on_the_npu(adapter), (rows, places, weights.float()), ()):
        assert share <= 1, f"{part} is off by {share:.3g} times the tolerance"


def test_interleaved_features_of_many_rows_and_heads_are_turned():
    """CANN takes fewer than 1,000 rows times heads; 8 rows of 128 heads are DeepSeek-V3's."""
    contract = CONTRACTS["rotary"]
    (adapter,) = [each for each in ADAPTERS if each.operator == contract.name]
    for tables in (1, 8):
        sizes = {"B": 8, "C": tables, "S": 3, "Hq": 128, "Hk": 1, "D": 4, "R/2": 2}
        drawn = tuple(contract.draw(sizes, dtype=torch.float32).values())
        for part, share in compare(contract, on_the_npu(adapter), drawn, (True,)):
            assert share <= 1, f"{part} is off by {share:.3g} times the tolerance"
