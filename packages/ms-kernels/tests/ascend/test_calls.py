"""Which aclnn calls a block makes on an NPU, and that they compute what the CPU does."""

import pytest
import torch

from ms_kernels import use_backend

from . import null_runtime
from .blocks import (
    DeepseekExperts,
    DeepseekLatentBlock,
    LatentBlock,
    LlamaBlock,
    MixtureBlock,
    inputs_of,
)
from .null_runtime.cli import written

BLOCKS = {
    "llama": LlamaBlock,
    "mixture": MixtureBlock,
    "latent": LatentBlock,
    "deepseek_latent": DeepseekLatentBlock,
    "deepseek_experts": DeepseekExperts,
}


def run(block, device, dtype, backends):
    """Return a block's result, gradients and calls each way, as of its second step."""
    torch.manual_seed(0)
    module = block().to(device, dtype)
    given = [each.to(device) for each in inputs_of(block, dtype)]
    for _ in range(2):  # masks and widened tables are made once, in the first
        given[0] = given[0].detach().requires_grad_()
        module.zero_grad()
        with use_backend(*backends), null_runtime.record() as forward:
            result = module(*given)
        pull = torch.full(result.shape, 0.5, dtype=dtype).to(device)
        with null_runtime.record() as backward:
            result.backward(pull)
    gradients = [given[0].grad, *(each.grad for each in module.parameters())]
    return [each.detach().cpu() for each in (result, *gradients)], forward, backward


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_calls_of_a_block_are_as_written_down(name, dtype, golden):
    """The golden file lists every aclnn call, forward and backward, so that a change is seen."""
    _, forward, backward = run(BLOCKS[name], "npu", dtype, ("ascend", "reference"))
    text = [f"forward: {len(forward)} calls", *written(forward)]
    text += ["", f"backward: {len(backward)} calls", *written(backward)]
    golden(f"{name}_{str(dtype)[6:]}.txt", "\n".join(text) + "\n")


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_computes_on_the_npu_what_it_computes_on_the_cpu(name):
    """The same numbers, forward and backward, from the fused calls and from plain torch."""
    here, _, _ = run(BLOCKS[name], "cpu", torch.float32, ("reference",))
    for backends in (("ascend", "reference"), ("reference",)):
        there, _, _ = run(BLOCKS[name], "npu", torch.float32, backends)
        for got, truth in zip(there, here, strict=True):
            # Sums of up to 128 float32 terms of order one in another order.
            torch.testing.assert_close(got, truth, rtol=1e-4, atol=1e-4)


def test_a_fused_block_is_twelve_calls():
    """Two norms, four products, two rotations, attention, a gate, two sums; plain, many more."""
    _, fused, fused_back = run(LlamaBlock, "npu", torch.float32, ("ascend",))
    _, plain, plain_back = run(LlamaBlock, "npu", torch.float32, ("reference",))
    assert len(fused) == 12
    assert len(plain) > 3 * len(fused)
    assert len(plain_back) > 2 * len(fused_back)
