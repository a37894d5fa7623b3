"""The public function `permute_tokens`."""

from torch import Tensor

from ms_kernels.core.dispatch import describe_call, perform
from ms_kernels.core.split_rows import is_split, permuted
from ms_kernels.operators.permute_tokens.contract import CONTRACT


def permute_tokens(x: Tensor, experts: Tensor, *, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort token rows by their routed experts, C experts per token.

    Args:
        x: (T, H).
        experts: routed experts (T, C) int64 or int32, from 0 to count - 1. An out-of-range index
            raises on the CPU; on an accelerator its row is sorted last and not counted.
        count: number of experts.

    Returns:
        rows (T·C, H), dtype of x, sorted by expert and then by token; counts (count,) int64, rows
        per expert; places (T, C) int64, the row of each choice. Only rows is differentiable. Pass
        rows and counts to `grouped_matmul`, and places to `unpermute_tokens`.

    A DTensor x may stay sharded over features, and so are the rows; tokens are gathered.
    """
    if not is_split((x, experts)):
        return perform(CONTRACT, (x, experts), (count,))
    CONTRACT.bind(describe_call(CONTRACT, (x, experts), (count,)))
    result: tuple[Tensor, Tensor, Tensor] = permuted(
        CONTRACT, (x, experts), lambda *shards: perform(CONTRACT, shards, (count,))
    )
    return result
