"""torch.compile over the adapters: one graph, forward and backward, with the same numbers."""

import pytest
import torch

import ms_kernels
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS

ADAPTERS = [each for each in IMPLEMENTATIONS if each.backend == "ascend"]


def differentiate(contract, run, tensors):
    """Return results and gradients on the CPU."""
    given = {name: tensor.clone() for name, tensor in tensors.items()}
    leaves = [
        given[argument.name].requires_grad_()
        for argument in contract.arguments
        if argument.differentiable and not contract.mutates
    ]
    results = run(**given, **{option.name: option.default for option in contract.options})
    if contract.mutates:
        results = tuple(given.values())
    results = results if isinstance(results, tuple) else (results,)
    pulled = [each for each in results if each.requires_grad]
    pulls = [torch.ones_like(each) for each in pulled]
    slopes = torch.autograd.grad(pulled, leaves, pulls) if leaves else ()
    return [each.detach().cpu() for each in (*results, *slopes)]


@pytest.mark.parametrize("implementation", ADAPTERS, ids=lambda each: each.operator)
def test_torch_compile_makes_one_graph_of_every_operator(implementation):
    """No graph break on an NPU; decoding, which reads lengths, falls to the reference."""
    contract = CONTRACTS[implementation.operator]
    single = torch.float32 in implementation.dtypes
    drawn = contract.draw({}, dtype=torch.float32 if single else torch.bfloat16)
    tensors = {name: tensor.npu() for name, tensor in drawn.items()}
    plain = getattr(ms_kernels, implementation.operator)
    torch._dynamo.reset()
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    pairs = zip(
        differentiate(contract, compiled, tensors),
        differentiate(contract, plain, tensors),
        strict=True,
    )
    for got, truth in pairs:
        # The same calls; decoding takes another backend, and bfloat16 rounds it by an eps.
        tolerance = 1e-5 if single else 2**-7
        torch.testing.assert_close(got, truth, rtol=tolerance, atol=tolerance)
