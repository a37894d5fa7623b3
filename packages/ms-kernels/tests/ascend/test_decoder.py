"""A training step of ms-parallel's decoders on npu:0, beside the same step on the CPU."""

import pytest
import torch

import ms_kernels
from ms_kernels import use_backend
from ms_parallel.models import DecoderConfig
from ms_parallel.models.experts.router_stats import DocumentNumbers, RouterStats

from . import null_runtime
from .blocks import DEEPSEEK, DeepseekExperts, drawn, inputs_of

LLAMA = DecoderConfig(
    vocab_size=80,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


def step(config, device, backends, documents):
    """Clip and step; return loss, gradients, new weights and the calls."""
    torch.manual_seed(0)
    model = drawn(config).to(device)
    tokens = torch.randint(config.vocab_size, (2, 33)).to(device)
    rows = torch.arange(32).div(13, rounding_mode="floor").int().expand(2, 32).to(device)
    positions = torch.arange(32).expand(2, 32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with use_backend(*backends), null_runtime.record() as calls:
        packed = rows if documents else None
        logits = model(tokens[:, :-1], positions=positions, documents=packed)
        loss = ms_kernels.cross_entropy(logits, tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        gradients = [each.grad.cpu() for each in model.parameters()]
        optimizer.step()
    weights = [each.detach().cpu() for each in model.parameters()]
    return loss.detach().cpu(), gradients, weights, [call.name for call in calls]


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama", "deepseek_v3"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("backends", [("ascend",), ("reference",)])
def test_a_training_step_on_the_npu_equals_the_cpus(backends, documents, config):
    """Loss, every gradient and every new weight agree in float32 within 1e-5."""
    here = step(config, "cpu", ("reference",), documents)
    there = step(config, "npu", backends, documents)
    torch.testing.assert_close(there[0], here[0], rtol=1e-5, atol=1e-5)
    for got, truth in zip(there[1], here[1], strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5)
    for got, truth, slope in zip(there[2], here[2], here[1], strict=True):
        # Adam's first step is lr · sign(slope): where a slope is but rounding, so is its sign.
        sure = slope.abs() > 1e-6
        torch.testing.assert_close(got[sure], truth[sure], rtol=1e-5, atol=1e-5)
    fused = [name for name in there[3] if "FlashAttention" in name or "RmsNorm" in name]
    assert bool(fused) == (backends == ("ascend",))


def account_on(device):
    """Return counts of an update's tokens, sums of its balance, and the router's gradient."""
    torch.manual_seed(0)
    mixture = DeepseekExperts().mixture.to(device)
    router = mixture.gate
    experts = router.choice.num_experts
    stats = RouterStats(experts, DocumentNumbers(), rate=0.5, z_rate=0.1, device=device)
    router.stats = stats
    (x,) = inputs_of(DeepseekExperts, torch.float32)
    mixture(x.to(device)).sum().backward()
    return stats.counts.cpu(), stats.sums.cpu(), router.weight.grad.cpu()


def test_a_router_counts_and_balances_on_the_npu_as_on_the_cpu():
    """Counts are equal; sums, and what balance adds to the gradient, agree within 1e-5."""
    (counts, *here), (found, *there) = account_on("cpu"), account_on("npu")
    assert torch.equal(found, counts)
    assert counts.sum() == 2 * 16 * DEEPSEEK.num_experts_per_tok
    torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-5)
