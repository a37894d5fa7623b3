"""The experts of a layer, all in two tensors, each computing for the tokens that chose it.

Shapes: B rows, S positions, H hidden, E experts, I width of one expert, k choices of a token.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ms_parallel.operators.experts import swiglu_of_pairs
from ms_parallel.operators.plain import swiglu
from ms_parallel.operators.protocol import Ops


class GroupedLinear(nn.Module):
    """A linear map for each expert.

    Args:
        experts: E.
        outputs: Sizes of what comes out; more than one for several maps that share their input.
        inputs: Size of what goes in.
        bias: Whether something is added.
        ops: Operators.
    """

    def __init__(
        self, experts: int, outputs: tuple[int, ...], inputs: int, *, bias: bool, ops: Ops
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, *outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts, *outputs)) if bias else None
        self.share = 1.0
        """Share of the bias that this process adds, where a sum over processes follows."""
        self.ops = ops

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows (T, inputs), `counts` (E,) of each expert in turn, to (T, all outputs)."""
        weight = _local(self.weight).flatten(1, -2)
        made = self.ops.grouped_matmul(rows, weight.transpose(1, 2), counts)
        if self.bias is None:
            return made
        # A product too, so that its gradient is a sum in the order of the rows.
        bias = _local(self.bias).flatten(1)[:, None] * self.share
        return made + self.ops.grouped_matmul(rows.new_ones(len(rows), 1), bias, counts)


Back = Callable[[Tensor], Tensor]
"""From what experts made of the rows that came here, to what they made of those that were here."""

Dispatch = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Back]]
"""From rows (T, H) of each of all experts in turn, `counts` (E,) of them, to the rows of the
experts that are here, their counts, and the way back."""


def stay(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Back]:
    """Leave the rows as they are: the dispatch where all experts are here."""
    return rows, counts, lambda made: made


class Experts(nn.Module):
    """Gated feed-forwards, of which each token passes those that it chose.

    No token is dropped, however many chose an expert.

    Args:
        experts: E.
        hidden: H.
        inner: I.
        ops: Operators.
        gate: Of two tensors; SwiGLU by default.
        bias: Whether the linear maps have one.
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
        # The two halves have a dim of their own, so that a split of I splits both.
        self.gate_up_proj = GroupedLinear(experts, (2, inner), hidden, bias=bias, ops=ops)
        self.down_proj = GroupedLinear(experts, (hidden,), inner, bias=bias, ops=ops)
        self.count = experts
        self.gate = gate or ops.swiglu
        self.dispatch: Dispatch = stay
        """Where processes share out the experts, brings rows to theirs."""
        self.ops = ops

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Map hidden (B, S, H), experts and weights (B, S, k) to (B, S, H)."""
        tokens, chosen = hidden.flatten(0, 1), experts.flatten(0, 1)
        rows, counts, places = self.ops.permute_tokens(tokens, chosen, count=self.count)
        rows, counts, back = self.dispatch(rows, counts)
        pairs = self.gate_up_proj(rows, counts).unflatten(-1, (2, -1))
        opened = swiglu_of_pairs(pairs) if self.gate is swiglu else self.gate(*pairs.unbind(-2))
        rows = back(self.down_proj(opened, counts))
        out = self.ops.unpermute_tokens(rows, places, weights.flatten(0, 1))
        return out.view_as(hidden)


def _local(weight: Tensor) -> Tensor:
    """Take this process's part of a weight, differentiably."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
