"""Training steps of a Llama block: ours and plain torch, eager and compiled."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ms_kernels
from accelerator.report import Report

__all__ = ["Block", "Plain", "measure"]


class Block(nn.Module):
    """A Llama block whose operators are passed in."""

    def __init__(self, operators: object, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.operators, self.heads, self.groups, self.head = (
            operators,
            heads,
            groups,
            width // heads,
        )
        self.first, self.second = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * groups * self.head, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the block's result; x is (B, S, H)."""
        batch, length, _ = x.shape
        normed = self.operators.rms_norm(x, self.first)
        q = self.query(normed).view(batch, length, self.heads, self.head)
        kv = self.key_value(normed).view(batch, length, 2 * self.groups, self.head)
        k, v = kv.split(self.groups, dim=2)
        q, k = self.operators.rotary(q, k, cos, sin)
        mixed = self.operators.attention(q, k, v).reshape(batch, length, -1)
        normed, x = self.operators.add_rms_norm(self.output(mixed), x, self.second)
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return x + self.down(self.operators.swiglu(gate, up))


class Plain:
    """Operators as a careful user writes them in torch, for torch.compile to fuse."""

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        """Normalize rows."""
        return F.rms_norm(x, weight.shape, weight, 1e-6)

    @staticmethod
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Add and normalize rows."""
        x = x + residual
        return F.rms_norm(x, weight.shape, weight, 1e-6), x

    @staticmethod
    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Apply rotary position embedding to q and k."""
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        rotated = []
        for x in (q, k):
            first, second = x.float().chunk(2, dim=-1)
            pair = (first * cos - second * sin, second * cos + first * sin)
            rotated.append(torch.cat(pair, dim=-1).to(x.dtype))
        return rotated[0], rotated[1]

    @staticmethod
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention."""
        heads = (t.transpose(1, 2) for t in (q, k, v))
        result = F.scaled_dot_product_attention(
            *heads, is_causal=True, enable_gqa=q.shape[2] != k.shape[2]
        )
        return result.transpose(1, 2)

    @staticmethod
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        """SiLU-gated product."""
        return F.silu(gate) * up


def measure(report: Report) -> None:
    """Time a training step of each version, and compare results."""
    width, heads, groups, inner = (32, 4, 2, 64) if report.small else (4096, 32, 8, 14336)
    batch, length = (2, 16) if report.small else (2, 4096)
    dtype = torch.float32 if report.small else torch.bfloat16
    torch.manual_seed(0)
    x = torch.randn(batch, length, width, device=report.device, dtype=dtype).requires_grad_()
    half = width // heads // 2
    positions = torch.arange(length, device=report.device).float()
    radians = torch.outer(positions, 10000.0 ** -(torch.arange(half, device=report.device) / half))[
        None
    ]
    angles, state = (radians.cos(), radians.sin()), None
    steps: dict[str, Callable[[], Tensor]] = {}
    for name, operators, compiled in (
        ("plain", Plain, False),
        ("plain, compiled", Plain, True),
        ("ms_kernels", ms_kernels, False),
        ("ms_kernels, compiled", ms_kernels, True),
    ):
        if report.small and compiled:
            continue
        block = Block(operators, width, heads, groups, inner).to(report.device, dtype)
        state = state or block.state_dict()
        block.load_state_dict(state)
        steps[name] = _step(torch.compile(block) if compiled else block, block, x, angles)
    seconds_of, failed = report.times(
        steps, spend_s=1.0, rounds=3, may_fail=lambda name: name.startswith("plain")
    )
    report.table("method", "ms", "speedup over plain, compiled", "extra MiB", "error")
    base = seconds_of.get("plain, compiled", seconds_of.get("plain", float("nan")))
    expected = steps["plain"]().float() if "plain" in seconds_of else None
    for name, seconds in seconds_of.items():
        error = (
            ""
            if expected is None
            else f"{(steps[name]().float() - expected).abs().max().item():.3g}"
        )
        extra = f"{report.extra_mib(steps[name]):.0f}"
        report.row(name, f"{1e3 * seconds:.3f}", f"{base / seconds:.2f}", extra, error)
    for name, reason in failed.items():
        report.row(name, "failed", reason, "", "")


def _step(
    run: Callable[..., Tensor], block: nn.Module, x: Tensor, angles: tuple[Tensor, Tensor]
) -> Callable[[], Tensor]:
    def step() -> Tensor:
        result = run(x, *angles)
        block.zero_grad(set_to_none=True)
        result.backward(torch.ones_like(result))
        x.grad = None
        return result.detach()

    return step
