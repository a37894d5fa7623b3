"""A Llama block, a mixture and a latent attention, written with the operators of ms_kernels."""

import torch
import torch.nn.functional as F
from torch import nn

import ms_kernels

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


def inputs_of(block, dtype):
    """Make what a block takes, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, LENGTH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    if block is MixtureBlock:
        return (x,)
    half = (TURNED if block is LatentBlock else WIDTH // HEADS) // 2
    angles = torch.outer(torch.arange(LENGTH), 10000.0 ** (-torch.arange(half) / half))
    return x, angles.cos()[None], angles.sin()[None]
