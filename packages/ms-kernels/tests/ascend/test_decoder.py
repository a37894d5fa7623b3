"""A training step of ms-parallel's decoders on npu:0 against the same step on the CPU."""

import pytest
import torch

import ms_kernels
from ms_kernels import use_backend
from ms_parallel.models import DecoderConfig
from ms_parallel.models.experts.router_stats import DocumentNumbers, RouterStats

from . import null_runtime
from .blocks import DEEPSEEK, DeepseekExperts, inputs_of, random_model

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
    """Run one clipped optimizer step; return loss, gradients, new weights and calls."""
    torch.manual_seed(0)
    model = random_model(config).to(device)
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
        gradients = [param.grad.cpu() for param in model.parameters()]
        optimizer.step()
    weights = [param.detach().cpu() for param in model.parameters()]
    return loss.detach().cpu(), gradients, weights, [call.name for call in calls]


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama", "deepseek_v3"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("backends", [("ascend",), ("reference",)])
def test_a_training_step_on_the_npu_matches_the_cpu(backends, documents, config):
    """Loss, gradients and new weights agree in float32 within 1e-5."""
    on_cpu = step(config, "cpu", ("reference",), documents)
    on_npu = step(config, "npu", backends, documents)
    torch.testing.assert_close(on_npu[0], on_cpu[0], rtol=1e-5, atol=1e-5)
    for actual, expected in zip(on_npu[1], on_cpu[1], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for actual, expected, grad in zip(on_npu[2], on_cpu[2], on_cpu[1], strict=True):
        # Adam's first step is lr * sign(grad), and the sign of rounding noise is random.
        significant = grad.abs() > 1e-6
        torch.testing.assert_close(actual[significant], expected[significant], rtol=1e-5, atol=1e-5)
    fused = [name for name in on_npu[3] if "FlashAttention" in name or "RmsNorm" in name]
    assert bool(fused) == (backends == ("ascend",))


def router_stats_on(device):
    """Return token counts of an update, sums of its balance loss, and the router's gradient."""
    torch.manual_seed(0)
    mixture = DeepseekExperts().mixture.to(device)
    router = mixture.gate
    experts = router.choice.num_experts
    stats = RouterStats(experts, DocumentNumbers(), rate=0.5, z_rate=0.1, device=device)
    router.stats = stats
    (x,) = inputs_of(DeepseekExperts, torch.float32)
    mixture(x.to(device)).sum().backward()
    return stats.counts.cpu(), stats.sums.cpu(), router.weight.grad.cpu()


def test_router_stats_on_the_npu_match_the_cpu():
    """Counts are equal; sums and the balance gradient agree within 1e-5."""
    (counts, *on_cpu), (npu_counts, *on_npu) = router_stats_on("cpu"), router_stats_on("npu")
    assert torch.equal(npu_counts, counts)
    assert counts.sum() == 2 * 16 * DEEPSEEK.num_experts_per_tok
    torch.testing.assert_close(on_npu, on_cpu, rtol=1e-5, atol=1e-5)
