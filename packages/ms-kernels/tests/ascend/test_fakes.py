"""Shapes without numbers: FakeTensor on device npu, forward and backward, and meta tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS

ADAPTERS = [each for each in IMPLEMENTATIONS if each.backend == "ascend"]
READS = {"decode_attention"}
"""Operators that read numbers of the device's."""
SHAPED = [
    each
    for each in ADAPTERS
    if each.operator not in READS and not each.merit.startswith("none:")  # refused always
]


def facts(outputs):
    """Return shapes and dtypes."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [(tuple(each.shape), each.dtype) for each in outputs if each is not None]


def dtypes_of(implementation):
    """Name the dtypes that an adapter takes."""
    return [dtype for dtype in (torch.float32, torch.bfloat16) if dtype in implementation.dtypes]


@pytest.mark.parametrize("implementation", SHAPED, ids=[each.operator for each in SHAPED])
def test_fake_tensors_become_what_real_ones_do(implementation):
    """Results and gradients have the reference's shapes and dtypes, without any device."""
    contract = CONTRACTS[implementation.operator]
    options = tuple(option.default for option in contract.options)
    for dtype in dtypes_of(implementation):
        drawn = contract.draw({}, dtype=dtype)
        truths = differentiate(contract, contract.reference, list(drawn.values()), options)
        with FakeTensorMode(allow_non_fake_inputs=False):
            fakes = [
                torch.empty(each.shape, dtype=each.dtype, device="npu") for each in drawn.values()
            ]
            found = differentiate(contract, implementation.run, fakes, options)
        assert found == truths


def differentiate(contract, run, tensors, options):
    """Return the facts of results and gradients."""
    leaves = [
        tensor.requires_grad_()
        for argument, tensor in zip(contract.arguments, tensors, strict=True)
        if argument.differentiable
    ]
    if contract.mutates:
        for tensor in leaves:
            tensor.requires_grad_(False)
        leaves = []
    output = run(*tensors, *options)
    if output is None:
        return []
    outputs = output if isinstance(output, tuple) else (output,)
    if not leaves:
        return facts(outputs)
    pulled = [each for each in outputs if each.requires_grad]
    slopes = torch.autograd.grad(pulled, leaves, [torch.ones_like(each) for each in pulled])
    return facts(outputs) + facts(slopes)
