"""Depthwise causal convolution that does not cross document boundaries.

Terms before the first position or in another document are excluded from all sums, forward and
backward: an inf or NaN in such an input, or in the tap that would multiply it, has no effect.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ms_kernels.contracts.arguments import Argument, Ladder, Work
from ms_kernels.contracts.call import Dims, accumulator
from ms_kernels.contracts.contract import Contract
from ms_kernels.contracts.documents import documents_argument, starts_of
from ms_kernels.contracts.options import flag


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    silu: bool = False,
    final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return ``Σ_d weight[:, K - 1 - d] · x[s - d] + bias``, with optional SiLU and state."""
    positions, width = x.shape[1], weight.shape[1]
    wide = accumulator(x.dtype)
    # Widen before slicing into taps; otherwise the gradient of every tap would be rounded.
    inputs = _with_state(x, state, width).to(wide)
    taps = weight.to(wide)  # (C, K)
    hidden = hidden_taps(documents, width)
    position_index = torch.arange(positions, device=x.device)
    total = torch.zeros_like(x, dtype=wide)
    for distance in range(width):
        # (B, S, C), x shifted by `distance`
        value = inputs[:, width - distance : width - distance + positions]
        tap = taps[:, width - 1 - distance]
        outside = hidden[distance] if hidden is not None else None  # (B, S)
        if state is None:
            before = (position_index < distance)[None]  # (1, S)
            outside = before if outside is None else outside | before
        if outside is not None and distance:
            # Zero both factors, so that neither pass multiplies 0 by inf.
            outside = outside.unsqueeze(-1)
            value, tap = value.masked_fill(outside, 0), tap.expand_as(x).masked_fill(outside, 0)
        total = total + value * tap
    total = total if bias is None else total + bias
    result = (F.silu(total) if silu else total).to(x.dtype)
    return (result, last_inputs(x, state, documents, width)) if final_state else result


def hidden_taps(documents: Tensor | None, width: int) -> list[Tensor] | None:
    """Return per tap distance a bool mask (B, S) of positions whose tap precedes their document."""
    if documents is None:
        return None
    starts = starts_of(documents)
    hidden = [torch.zeros_like(starts)]
    for distance in range(1, width):
        # A tap is hidden if a document starts within the last `distance` positions.
        hidden.append(hidden[-1] | F.pad(starts, (distance - 1, 0))[:, : starts.shape[1]])
    return hidden


def last_inputs(x: Tensor, state: Tensor | None, documents: Tensor | None, width: int) -> Tensor:
    """Return the last K inputs (B, K, C), with 0 before the document of the last position."""
    last = _with_state(x, state, width)[:, x.shape[1] :]
    hidden = hidden_taps(documents, width)
    if hidden is None:
        return last.clone()
    ends = torch.stack([mask[:, -1] for mask in reversed(hidden)], 1)
    return last.masked_fill(ends.unsqueeze(-1), 0)


def _with_state(x: Tensor, state: Tensor | None, width: int) -> Tensor:
    """Prepend the K inputs before the first position to x: `state`, or zeros if None."""
    return F.pad(x, (0, 0, width, 0)) if state is None else torch.cat((state, x), 1)


def _forward(dims: Dims, itemsize: int) -> Work:
    elements = dims["B"] * dims["S"] * dims["C"]
    return Work(2 * elements * itemsize, 2 * dims["K"] * elements)


def _backward(dims: Dims, itemsize: int) -> Work:
    elements = dims["B"] * dims["S"] * dims["C"]
    return Work(3 * elements * itemsize, 6 * dims["K"] * elements)


CONTRACT = Contract(
    name="causal_conv1d",
    summary="depthwise causal convolution within documents, with optional SiLU and state",
    arguments=(
        Argument(name="x", dims="B S C"),
        Argument(name="weight", dims="C K", like="x"),
        Argument(name="bias", dims="C", like="x", optional=True),
        documents_argument("B S"),
        Argument(name="state", dims="B K C", like="x", optional=True),
    ),
    options=(flag("silu"), flag("final_state")),
    returns="(B S C), dtype of x; with final_state=True a second one, (B K C)",
    results={"result": "B S C", "final": "B K C"},
    splits=("B", "C"),
    positive="S C K",
    forward=_forward,
    backward=_backward,
    example={"B": 2, "S": 48, "C": 64, "K": 4},
    reference=causal_conv1d,
    ladders=(Ladder({"B": 1, "C": 512, "K": 4}, ("S",)),),
)
