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
    """Return ``log softmax(hidden @ weight.T / temperature)[token]`` without storing all logits.

    The backward pass recomputes the logits. The weight's gradient is accumulated in float32. Not
    twice differentiable.

    Args:
        hidden: (..., H).
        weight: (V, H), dtype of hidden.
        tokens: (...) int64 or int32, from 0 to V - 1, or `ignore_index`.
        temperature: divisor of the logits, above 0.
        ignore_index: token of rows to ignore; their results are 0.
        entropy: also return the entropies ``-Σ p log p`` of the rows, in nats.

    Returns:
        Log-probabilities (...) float32 (float64 for float64); with `entropy` also the entropies.
        Both are differentiable.

    Rows of DTensors stay sharded; a sharded weight is gathered.
    """
    tensors, options = (hidden, weight, tokens), (temperature, ignore_index, entropy)
    if not is_split(tensors):
        return perform(CONTRACT, tensors, options)
    CONTRACT.bind(describe_call(CONTRACT, tensors, options))
    result: Tensor | tuple[Tensor, Tensor] = rows_mapped(
        CONTRACT, tensors, lambda *shards: perform(CONTRACT, shards, options)
    )
    return result
