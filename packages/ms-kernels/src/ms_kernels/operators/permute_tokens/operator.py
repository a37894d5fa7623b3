"""The public function `permute_tokens`."""

from torch import Tensor

from ms_kernels.core.dispatch import describe_call, perform
from ms_kernels.core.split_rows import is_split, permuted
from ms_kernels.operators.permute_tokens.contract import CONTRACT


def permute_tokens(x: Tensor, experts: Tensor, *, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the rows of a mixture's tokens by the experts they chose, C each.

    Args:
        x: (T, H).
        experts: (T, C) int64 or int32, from 0 to count - 1. One out of range raises on the CPU; in
            kernels on an accelerator its row comes last and is counted for no expert.
        count: how many experts there are.

    Returns:
        rows (T·C, H), dtype of x: those of expert 0 first, in the order of their tokens; counts
        (count,) int64: how many rows each expert has; places (T, C) int64: the row of each choice.
        The first is differentiable; it is what `grouped_matmul` takes with the second, and the
        third leads `unpermute_tokens` back.

    A DTensor x may stay split over features, as its rows then are; tokens are gathered.
    """
    if not is_split((x, experts)):
        return perform(CONTRACT, (x, experts), (count,))
    CONTRACT.bind(describe_call(CONTRACT, (x, experts), (count,)))
    result: tuple[Tensor, Tensor, Tensor] = permuted(
        CONTRACT, (x, experts), lambda *own: perform(CONTRACT, own, (count,))
    )
    return result
