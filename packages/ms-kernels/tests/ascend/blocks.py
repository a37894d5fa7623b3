"""Blocks of decoders on the operators of ms_kernels: of our own, and DeepSeek-V3's of ms_parallel.

Ours are a Llama block, a mixture, and latent attention with sinks.
"""

import torch
import torch.nn.functional as F
from torch import nn

import ms_kernels
from ms_parallel.models.parts.attention import RotaryContext
from ms_parallel.models.registry import architecture, build_model

WIDTH, HEADS, INNER, LENGTH, EXPERTS, CHOICES = 64, 4, 96, 16, 4, 2
NARROW, KEPT, TURNED, VALUE = 32, 16, 8, 16
"""Features of latent attention: what keys are made from, theirs that do not turn and that do."""


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        """(..., WIDTH) to the same."""
        return ms_kernels.rms_norm(x, self.weight)


class NarrowNorm(nn.Module):
    """RMSNorm of few features."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(NARROW))

    def forward(self, x):
        """(..., NARROW) to the same."""
        return ms_kernels.rms_norm(x, self.weight)


class LlamaBlock(nn.Module):
    """Queries, keys and values from one projection, gate and up from another."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([Norm(), Norm()])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        """(B, S, WIDTH) to the same."""
        projected = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = projected.unbind(-3)
        q, k = ms_kernels.rotary(q, k, cos, sin)
        x = x + self.out(ms_kernels.attention(q, k, v).flatten(-2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(ms_kernels.swiglu(gate, up))


class MixtureBlock(nn.Module):
    """A router and experts, each a SwiGLU; no token is dropped."""

    def __init__(self):
        super().__init__()
        self.norm = Norm()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER) * 0.1)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.1)

    def forward(self, x):
        """(B, S, WIDTH) to the same."""
        tokens = self.norm(x).flatten(0, -2)
        shares, experts = F.softmax(self.router(tokens), -1).topk(CHOICES)
        rows, counts, places = ms_kernels.permute_tokens(tokens, experts, count=EXPERTS)
        gate, up = ms_kernels.grouped_matmul(rows, self.gate_up, counts).chunk(2, -1)
        rows = ms_kernels.grouped_matmul(ms_kernels.swiglu(gate, up), self.down, counts)
        return x + ms_kernels.unpermute_tokens(rows, places, shares).view_as(x)


class LatentBlock(nn.Module):
    """Keys and values from few features, values of their own width, a sink of each head."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([Norm(), NarrowNorm(), NarrowNorm()])
        self.narrow = nn.Linear(WIDTH, 2 * NARROW + TURNED, bias=False)
        self.queries = nn.Linear(NARROW, HEADS * (KEPT + TURNED), bias=False)
        self.keys_values = nn.Linear(NARROW, HEADS * (KEPT + VALUE), bias=False)
        self.out = nn.Linear(HEADS * VALUE, WIDTH, bias=False)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, HEADS))

    def forward(self, x, cos, sin):
        """(B, S, WIDTH) to the same."""
        of_q, of_kv, shared = self.narrow(self.norms[0](x)).split((NARROW, NARROW, TURNED), -1)
        q = self.queries(self.norms[1](of_q)).unflatten(-1, (HEADS, -1))
        made = self.keys_values(self.norms[2](of_kv)).unflatten(-1, (HEADS, -1))
        (kept, turned), (keys, values) = q.split((KEPT, TURNED), -1), made.split((KEPT, VALUE), -1)
        turned, shared = ms_kernels.rotary(turned, shared.unsqueeze(-2), cos, sin)
        q = torch.cat((kept, turned), -1)
        k = torch.cat((keys, shared.expand(-1, -1, HEADS, -1)), -1)
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
        "q_lora_rank": NARROW,
        "kv_lora_rank": NARROW,
        "qk_nope_head_dim": KEPT,
        "qk_rope_head_dim": TURNED,
        "v_head_dim": VALUE,
        "n_routed_experts": 2 * EXPERTS,
        "num_experts_per_tok": CHOICES,
        "moe_intermediate_size": INNER // 2,
        "n_group": EXPERTS,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
)
"""Latent attention in both layers, experts in the second; interleaved positions."""


def drawn(config):
    """Build a model of ms_parallel with weights of order one, and routers whose choice is bent."""
    model = build_model(config, ops=ms_kernels)
    for parameter in model.parameters():
        scale = 0.1 if parameter.ndim > 1 else 0.0
        nn.init.normal_(parameter, mean=0.0 if scale else 1.0, std=scale)
    for name, bias in model.named_buffers():
        assert name.endswith("e_score_correction_bias")
        bias.copy_(torch.linspace(-0.2, 0.2, len(bias)))
    return model


class DeepseekLatentBlock(nn.Module):
    """The first layer of a DeepSeek-V3: latent attention and a plain feed-forward."""

    def __init__(self):
        super().__init__()
        self.layer = drawn(DEEPSEEK).model.layers["0"]

    def forward(self, x, cos, sin):
        """(B, S, WIDTH) to the same."""
        context = RotaryContext(tables=((cos, sin),), documents=None, cache=None, lengths=None)
        return self.layer(x, context=context)


class DeepseekExperts(nn.Module):
    """The feed-forward of its second layer: a router of sigmoids and groups, shared experts."""

    def __init__(self):
        super().__init__()
        self.mixture = drawn(DEEPSEEK).model.layers["1"].mlp

    def forward(self, x):
        """(B, S, WIDTH) to the same."""
        return self.mixture(x)


def inputs_of(block, dtype):
    """Make what a block takes, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, LENGTH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    if block in (MixtureBlock, DeepseekExperts):
        return (x,)
    half = (WIDTH // HEADS if block is LlamaBlock else TURNED) // 2
    angles = torch.outer(torch.arange(LENGTH), 10000.0 ** (-torch.arange(half) / half))
    # An engine's batches have positions of their own in every row.
    rows = len(x) if block is DeepseekLatentBlock else 1
    return x, *(table.repeat(rows, 1, 1) for table in (angles.cos(), angles.sin()))
