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
    """Depthwise causal convolution, as in Mamba and Gated DeltaNet.

    Args:
        x: (B, S, C).
        weight: (C, K), dtype of x; the last tap applies to the current position.
        bias: (C,), dtype of x. None: no bias.
        documents: document ids (B, S) int32 or int64. A document starts where the id changes; its
            positions do not see inputs before it.
        state: (B, K, C), dtype of x: the K inputs before x, oldest first, of the document that the
            first position continues. None: zeros.
        silu: apply SiLU to the result.
        final_state: also return the state after the last position.

    Returns:
        (B, S, C), dtype of x; with `final_state` also the last K inputs (B, K, C) of the last
        position's document, padded with zeros before its start.
    """
    return perform(CONTRACT, (x, weight, bias, documents, state), (silu, final_state))
