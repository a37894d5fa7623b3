"""Decoder blocks built on ms_kernels: our own, and DeepSeek-V3's from ms_parallel.

Ours are a Llama block, a mixture of experts, and latent attention with sinks.
"""

import torch
import torch.nn.functional as F
from torch import nn

import ms_kernels
from ms_parallel.models.parts.attention import RotaryContext
from ms_parallel.models.registry import architecture, build_model

WIDTH, HEADS, INNER, LENGTH, EXPERTS, CHOICES = 64, 4, 96, 16, 4, 2
LATENT, NOPE, ROPE, VALUE_DIM = 32, 16, 8, 16
"""Latent attention: latent width, key features without and with rotary, value features."""


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        """Map (..., WIDTH) to (..., WIDTH)."""
        return ms_kernels.rms_norm(x, self.weight)


class LatentNorm(nn.Module):
    """RMSNorm over the latent features."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(LATENT))

    def forward(self, x):
        """Map (..., LATENT) to (..., LATENT)."""
        return ms_kernels.rms_norm(x, self.weight)


class LlamaBlock(nn.Module):
    """A Llama block with fused QKV and gate-up projections."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([Norm(), Norm()])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        """Map (B, S, WIDTH) to (B, S, WIDTH)."""
        projected = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = projected.unbind(-3)
        q, k = ms_kernels.rotary(q, k, cos, sin)
        x = x + self.out(ms_kernels.attention(q, k, v).flatten(-2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(ms_kernels.swiglu(gate, up))


class MixtureBlock(nn.Module):
    """A router with SwiGLU experts and no token dropping."""

    def __init__(self):
        super().__init__()
        self.norm = Norm()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER) * 0.1)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.1)

    def forward(self, x):
        """Map (B, S, WIDTH) to (B, S, WIDTH)."""
        tokens = self.norm(x).flatten(0, -2)
        router_weights, experts = F.softmax(self.router(tokens), -1).topk(CHOICES)
        rows, counts, places = ms_kernels.permute_tokens(tokens, experts, count=EXPERTS)
        gate, up = ms_kernels.grouped_matmul(rows, self.gate_up, counts).chunk(2, -1)
        rows = ms_kernels.grouped_matmul(ms_kernels.swiglu(gate, up), self.down, counts)
        return x + ms_kernels.unpermute_tokens(rows, places, router_weights).view_as(x)


class LatentBlock(nn.Module):
    """Latent attention: low-rank keys and values, a separate value width, one sink per head."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([Norm(), LatentNorm(), LatentNorm()])
        self.narrow = nn.Linear(WIDTH, 2 * LATENT + ROPE, bias=False)
        self.queries = nn.Linear(LATENT, HEADS * (NOPE + ROPE), bias=False)
        self.keys_values = nn.Linear(LATENT, HEADS * (NOPE + VALUE_DIM), bias=False)
        self.out = nn.Linear(HEADS * VALUE_DIM, WIDTH, bias=False)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, HEADS))

    def forward(self, x, cos, sin):
        """Map (B, S, WIDTH) to (B, S, WIDTH)."""
        latent_q, latent_kv, shared_rope = self.narrow(self.norms[0](x)).split(
            (LATENT, LATENT, ROPE), -1
        )
        q = self.queries(self.norms[1](latent_q)).unflatten(-1, (HEADS, -1))
        keys_and_values = self.keys_values(self.norms[2](latent_kv)).unflatten(-1, (HEADS, -1))
        (nope, rope), (keys, values) = (
            q.split((NOPE, ROPE), -1),
            keys_and_values.split((NOPE, VALUE_DIM), -1),
        )
        rope, shared_rope = ms_kernels.rotary(rope, shared_rope.unsqueeze(-2), cos, sin)
        q = torch.cat((nope, rope), -1)
        k = torch.cat((keys, shared_rope.expand(-1, -1, HEADS, -1)), -1)
        mixed = ms_kernels.attention(q, k, values, scale=0.2, sinks=self.sinks)
        return x + self.out(mixed.flatten(-2))


DEEPSEEK = architecture(
    "deepseek_v3",
    {
        "vocab_size": 80,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": LATENT,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE_DIM,
        "n_routed_experts": 2 * EXPERTS,
        "num_experts_per_tok": CHOICES,
        "moe_intermediate_size": INNER // 2,
        "n_group": EXPERTS,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
)
"""Latent attention in both layers, experts in the second, interleaved rotary embedding."""


def random_model(config):
    """Build an ms_parallel model with random weights and nonzero router biases."""
    model = build_model(config, ops=ms_kernels)
    for parameter in model.parameters():
        scale = 0.1 if parameter.ndim > 1 else 0.0
        nn.init.normal_(parameter, mean=0.0 if scale else 1.0, std=scale)
    for name, bias in model.named_buffers():
        assert name.endswith("e_score_correction_bias")
        bias.copy_(torch.linspace(-0.2, 0.2, len(bias)))
    return model


class DeepseekLatentBlock(nn.Module):
    """The first layer of a DeepSeek-V3: latent attention and a dense feed-forward."""

    def __init__(self):
        super().__init__()
        self.layer = random_model(DEEPSEEK).model.layers["0"]

    def forward(self, x, cos, sin):
        """Map (B, S, WIDTH) to (B, S, WIDTH)."""
        context = RotaryContext(tables=((cos, sin),), documents=None, cache=None, lengths=None)
        return self.layer(x, context=context)


class DeepseekExperts(nn.Module):
    """The feed-forward of the second layer: sigmoid router with groups, and shared experts."""

    def __init__(self):
        super().__init__()
        self.mixture = random_model(DEEPSEEK).model.layers["1"].mlp

    def forward(self, x):
        """Map (B, S, WIDTH) to (B, S, WIDTH)."""
        return self.mixture(x)


def inputs_of(block, dtype):
    """Return a block's inputs on the CPU."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, LENGTH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    if block in (MixtureBlock, DeepseekExperts):
        return (x,)
    half = (WIDTH // HEADS if block is LlamaBlock else ROPE) // 2
    angles = torch.outer(torch.arange(LENGTH), 10000.0 ** (-torch.arange(half) / half))
    # In an engine's batches every row has its own positions.
    rows = len(x) if block is DeepseekLatentBlock else 1
    return x, *(table.repeat(rows, 1, 1) for table in (angles.cos(), angles.sin()))
