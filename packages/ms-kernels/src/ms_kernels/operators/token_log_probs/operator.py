"""The public function `token_log_probs`."""

from typing import Literal, overload

from torch import Tensor

from ms_kernels.core.dispatch import describe_call, perform
from ms_kernels.core.split_rows import is_split, rows_mapped
from ms_kernels.operators.token_log_probs.contract import CONTRACT


@overload
def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: Literal[False] = False,
) -> Tensor: ...


@overload
def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return ``log softmax(hidden @ weight.T / temperature)[token]`` without holding all logits.

    The logits are made again in the backward pass. The weight's gradient is summed in float32. It
    cannot be differentiated twice.

    Args:
        hidden: (..., H).
        weight: (V, H), dtype of hidden.
        tokens: (...) int64 or int32, from 0 to V - 1, or `ignore_index`.
        temperature: what logits are divided by; above 0.
        ignore_index: the token of a row that does not count; its results are 0.
        entropy: whether to return the entropies ``-Σ p log p`` of the rows as well, in nats.

    Returns:
        float32 (float64 for float64), (...); with `entropy` a pair of them. Both are
        differentiable.

    Rows of DTensors stay where they are; a weight that is split is gathered.
    """
    tensors, options = (hidden, weight, tokens), (temperature, ignore_index, entropy)
    if not is_split(tensors):
        return perform(CONTRACT, tensors, options)
    CONTRACT.bind(describe_call(CONTRACT, tensors, options))
    result: Tensor | tuple[Tensor, Tensor] = rows_mapped(
        CONTRACT, tensors, lambda *own: perform(CONTRACT, own, options)
    )
    return result
