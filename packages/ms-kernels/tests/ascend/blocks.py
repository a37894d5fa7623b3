"""One Llama block and one mixture block, written with the operators of ms_kernels."""

import torch
import torch.nn.functional as F
from torch import nn

import ms_kernels

WIDTH, HEADS, INNER, LENGTH, EXPERTS, CHOICES = 64, 4, 96, 16, 4, 2


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        """(..., WIDTH) to the same."""
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


def inputs_of(block, dtype):
    """Make what a block takes, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, LENGTH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    if block is MixtureBlock:
        return (x,)
    half = WIDTH // HEADS // 2
    angles = torch.outer(torch.arange(LENGTH), 10000.0 ** (-torch.arange(half) / half))
    return x, angles.cos()[None], angles.sin()[None]
