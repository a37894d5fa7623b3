"""FakeTensor on device npu: shapes without data, forward and backward."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS

ADAPTERS = [impl for impl in IMPLEMENTATIONS if impl.backend == "ascend"]
READS_VALUES = {"decode_attention"}
"""Operators that read values from the device."""
SHAPED = [
    impl
    for impl in ADAPTERS
    if impl.operator not in READS_VALUES and not impl.merit.startswith("none:")  # always refused
]


def shapes_and_dtypes(outputs):
    """Return shapes and dtypes of the outputs that are not None."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [(tuple(output.shape), output.dtype) for output in outputs if output is not None]


def dtypes_of(implementation):
    """Return the dtypes that an adapter supports."""
    return [dtype for dtype in (torch.float32, torch.bfloat16) if dtype in implementation.dtypes]


@pytest.mark.parametrize("implementation", SHAPED, ids=[impl.operator for impl in SHAPED])
def test_fake_results_match_real_ones(implementation):
    """Results and gradients have the reference's shapes and dtypes, without a device."""
    contract = CONTRACTS[implementation.operator]
    options = tuple(option.default for option in contract.options)
    for dtype in dtypes_of(implementation):
        example = contract.draw({}, dtype=dtype)
        expected = differentiate(contract, contract.reference, list(example.values()), options)
        with FakeTensorMode(allow_non_fake_inputs=False):
            fakes = [
                torch.empty(tensor.shape, dtype=tensor.dtype, device="npu")
                for tensor in example.values()
            ]
            result = differentiate(contract, implementation.run, fakes, options)
        assert result == expected


def differentiate(contract, run, tensors, options):
    """Return shapes and dtypes of results and gradients."""
    leaves = [
        tensor.requires_grad_()
        for argument, tensor in zip(contract.arguments, tensors, strict=True)
        if argument.differentiable
    ]
    output = run(*tensors, *options)
    outputs = output if isinstance(output, tuple) else (output,)
    if not leaves:
        return shapes_and_dtypes(outputs)
    differentiable = [part for part in outputs if part.requires_grad]
    grads = torch.autograd.grad(
        differentiable, leaves, [torch.ones_like(part) for part in differentiable]
    )
    return shapes_and_dtypes(outputs) + shapes_and_dtypes(grads)
