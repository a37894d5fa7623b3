"""Experts of a layer as grouped linear maps over two weight tensors.

Shapes: B rows, S positions, H hidden, E experts, I expert width, k experts per token.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ms_parallel.operators.experts import swiglu_of_pairs
from ms_parallel.operators.plain import swiglu
from ms_parallel.operators.protocol import Ops


class GroupedLinear(nn.Module):
    """One linear map per expert.

    Args:
        experts: Number of experts E.
        outputs: Output dims; more than one for several maps with a shared input.
        inputs: Input size.
        bias: Whether the maps have a bias.
        ops: Operators.
    """

    def __init__(
        self, experts: int, outputs: tuple[int, ...], inputs: int, *, bias: bool, ops: Ops
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, *outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts, *outputs)) if bias else None
        self.share = 1.0
        """Fraction of the bias to add on this process if the output is summed over processes."""
        self.interleaved = False
        """True if gate and up rows alternate in checkpoints, as in gpt-oss."""
        self.ops = ops

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows (T, inputs), sorted by expert with `counts` (E,), to (T, total outputs)."""
        weight = _local(self.weight).flatten(1, -2)  # (E, total outputs, inputs)
        # grouped_matmul needs (E, inputs, outputs).
        out = self.ops.grouped_matmul(rows, weight.transpose(1, 2), counts)
        if self.bias is None:
            return out
        # As a grouped product, the bias gradient sums rows in a fixed order.
        bias = _local(self.bias).flatten(1)[:, None] * self.share
        return out + self.ops.grouped_matmul(rows.new_ones(len(rows), 1), bias, counts)


Combine = Callable[[Tensor], Tensor]
"""Returns expert outputs to the processes that dispatched the rows."""

Dispatch = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Combine]]
"""Sends rows (T, H), sorted by expert with `counts` (E,), to the processes of their experts;
returns the rows and counts of the local experts, and the `Combine` function."""


def no_dispatch(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Combine]:
    """Return the rows unchanged: the dispatch for local experts."""
    return rows, counts, lambda out: out


class Experts(nn.Module):
    """Gated feed-forward experts without a capacity limit: no token is dropped.

    Args:
        experts: Number of experts E.
        hidden: Hidden size H.
        inner: Expert width I.
        ops: Operators.
        gate: Gating function of (gate, up); SwiGLU by default.
        bias: Whether the linear maps have a bias.
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        inner: int,
        ops: Ops,
        *,
        gate: Callable[[Tensor, Tensor], Tensor] | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        # Gate and up are a separate dim, so splitting I splits both.
        self.gate_up_proj = GroupedLinear(experts, (2, inner), hidden, bias=bias, ops=ops)
        self.down_proj = GroupedLinear(experts, (hidden,), inner, bias=bias, ops=ops)
        self.count = experts
        self.gate = gate or ops.swiglu
        self.dispatch: Dispatch = no_dispatch
        """Sends rows to the processes of their experts under expert parallelism."""
        self.ops = ops

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Map hidden (B, S, H), experts and weights (B, S, k) to (B, S, H)."""
        tokens, indices = hidden.flatten(0, 1), experts.flatten(0, 1)  # (B·S, H), (B·S, k)
        rows, counts, row_map = self.ops.permute_tokens(tokens, indices, count=self.count)
        # All-to-all under expert parallelism: from here to `back`, the rows of local experts.
        rows, counts, combine = self.dispatch(rows, counts)
        pairs = self.gate_up_proj(rows, counts).unflatten(-1, (2, -1))  # (rows, 2, I)
        activated = swiglu_of_pairs(pairs) if self.gate is swiglu else self.gate(*pairs.unbind(-2))
        rows = combine(self.down_proj(activated, counts))  # (B·S·k, H), sorted by expert
        out = self.ops.unpermute_tokens(rows, row_map, weights.flatten(0, 1))
        return out.view_as(hidden)


def _local(weight: Tensor) -> Tensor:
    """Return this process's part of a weight, differentiably."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
