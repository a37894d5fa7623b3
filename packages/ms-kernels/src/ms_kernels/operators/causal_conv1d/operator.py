"""The public function `causal_conv1d`."""

from typing import Literal, overload

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.operators.causal_conv1d.contract import CONTRACT


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    silu: bool = False,
    final_state: Literal[False] = False,
) -> Tensor: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    silu: bool = False,
    final_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    silu: bool = False,
    final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve each channel with its own K weights over the newest K positions.

    Args:
        x: (B, S, C).
        weight: (C, K), dtype of x; the last one meets the position itself.
        bias: (C,), dtype of x; none if None.
        documents: (B, S) int32 or int64; a new one begins where the number changes, and no
            position sees an input from before its document.
        state: (B, K, C), dtype of x: the K inputs before x, the oldest first, of the document that
            the first position goes on with; zeros if None.
        silu: whether the result goes through SiLU.
        final_state: whether to return the state after the last position as well.

    Returns:
        (B, S, C), dtype of x; with `final_state` also the last K inputs of the last position's
        document, (B, K, C), zeros before it began.
    """
    return perform(CONTRACT, (x, weight, bias, documents, state), (silu, final_state))
