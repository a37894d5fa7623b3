"""The aclnn calls that a block makes on an NPU, and that their results match the CPU."""

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
from .null_runtime.cli import format_calls

BLOCKS = {
    "llama": LlamaBlock,
    "mixture": MixtureBlock,
    "latent": LatentBlock,
    "deepseek_latent": DeepseekLatentBlock,
    "deepseek_experts": DeepseekExperts,
}


def run(block, device, dtype, backends):
    """Return a block's result, gradients and calls in each direction, in its second step."""
    torch.manual_seed(0)
    module = block().to(device, dtype)
    inputs = [tensor.to(device) for tensor in inputs_of(block, dtype)]
    for _ in range(2):  # masks and widened tables are created in the first step
        inputs[0] = inputs[0].detach().requires_grad_()
        module.zero_grad()
        with use_backend(*backends), null_runtime.record() as forward:
            result = module(*inputs)
        grad_out = torch.full(result.shape, 0.5, dtype=dtype).to(device)
        with null_runtime.record() as backward:
            result.backward(grad_out)
    gradients = [inputs[0].grad, *(param.grad for param in module.parameters())]
    return [tensor.detach().cpu() for tensor in (result, *gradients)], forward, backward


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_calls_of_a_block_match_the_golden_file(name, dtype, golden):
    """It lists every aclnn call, forward and backward, so that changes show in review."""
    _, forward, backward = run(BLOCKS[name], "npu", dtype, ("ascend", "reference"))
    text = [f"forward: {len(forward)} calls", *format_calls(forward)]
    text += ["", f"backward: {len(backward)} calls", *format_calls(backward)]
    golden(f"{name}_{str(dtype)[6:]}.txt", "\n".join(text) + "\n")


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_on_the_npu_matches_the_cpu(name):
    """Forward and backward, for the fused calls and for plain torch."""
    on_cpu, _, _ = run(BLOCKS[name], "cpu", torch.float32, ("reference",))
    for backends in (("ascend", "reference"), ("reference",)):
        on_npu, _, _ = run(BLOCKS[name], "npu", torch.float32, backends)
        for actual, expected in zip(on_npu, on_cpu, strict=True):
            # Float32 sums of up to 128 terms of order one in another order.
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_fused_block_is_twelve_calls():
    """Two norms, four products, two rotations, attention, a gate, two sums; many more unfused."""
    _, fused, fused_back = run(LlamaBlock, "npu", torch.float32, ("ascend",))
    _, plain, plain_back = run(LlamaBlock, "npu", torch.float32, ("reference",))
    assert len(fused) == 12
    assert len(plain) > 3 * len(fused)
    assert len(plain_back) > 2 * len(fused_back)
