"""torch.compile over the adapters: one graph, forward and backward, with the same numbers."""

import pytest
import torch

import ms_kernels
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS

ADAPTERS = [impl for impl in IMPLEMENTATIONS if impl.backend == "ascend"]


def differentiate(contract, run, tensors):
    """Return results and gradients on the CPU."""
    inputs = {name: tensor.clone() for name, tensor in tensors.items()}
    leaves = [
        inputs[argument.name].requires_grad_()
        for argument in contract.arguments
        if argument.differentiable
    ]
    results = run(**inputs, **{option.name: option.default for option in contract.options})
    results = results if isinstance(results, tuple) else (results,)
    differentiable = [result for result in results if result.requires_grad]
    grad_outputs = [torch.ones_like(result) for result in differentiable]
    grads = torch.autograd.grad(differentiable, leaves, grad_outputs) if leaves else ()
    return [tensor.detach().cpu() for tensor in (*results, *grads)]


@pytest.mark.parametrize("implementation", ADAPTERS, ids=lambda impl: impl.operator)
def test_torch_compile_makes_one_graph_of_every_operator(implementation):
    """No graph break on an NPU; decode_attention reads lengths and uses the reference."""
    contract = CONTRACTS[implementation.operator]
    is_float32 = torch.float32 in implementation.dtypes
    example = contract.draw({}, dtype=torch.float32 if is_float32 else torch.bfloat16)
    tensors = {name: tensor.npu() for name, tensor in example.items()}
    plain = getattr(ms_kernels, implementation.operator)
    torch._dynamo.reset()
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    pairs = zip(
        differentiate(contract, compiled, tensors),
        differentiate(contract, plain, tensors),
        strict=True,
    )
    for compiled_output, plain_output in pairs:
        # The same calls, except decoding, whose other backend differs by one bfloat16 rounding.
        tolerance = 1e-5 if is_float32 else 2**-7
        torch.testing.assert_close(compiled_output, plain_output, rtol=tolerance, atol=tolerance)
