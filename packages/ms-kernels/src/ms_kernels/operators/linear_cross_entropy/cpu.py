"""Losses and log-probabilities of only those rows that count, found before any work is done.

Where prompts are ignored, as in fine-tuning, most rows may be; they cost nothing then. An
accelerator would have to wait for their number, the CPU need not.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ms_kernels.backends.cpu import on_cpu
from ms_kernels.contracts.call import accumulator
from ms_kernels.operators.linear_cross_entropy.contract import CONTRACT

MERIT = "does no work for ignored rows"


def of_counted_rows(
    run: Callable[[Tensor, Tensor, Tensor], Any],
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
) -> Any:
    """Call `run` with only those rows that count; the results of all others are 0.

    Args:
        run: returns a number a row, a tuple of such, or one number for all rows.
        hidden: (..., H).
        weight: (V, H).
        targets: (...).
        ignore_index: the target of a row that does not count.
    """
    flat = targets.reshape(-1)
    rows = (flat != ignore_index).nonzero().squeeze(-1)
    # The copy of hidden must be worth it: leave out at least one row in sixteen.
    if len(rows) > flat.numel() - flat.numel() // 16:
        return run(hidden, weight, targets)
    chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows)
    found = run(chosen, weight, flat[rows])
    empty = hidden.new_zeros(flat.shape, dtype=accumulator(hidden.dtype))

    def spread(each: Tensor) -> Tensor:
        return empty.index_copy(0, rows, each).view(targets.shape) if each.ndim else each

    return tuple(map(spread, found)) if isinstance(found, tuple) else spread(found)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, *options: Any
) -> Tensor:
    """Return what `cross_entropy` of ``hidden @ weight.T`` returns."""
    result: Tensor = of_counted_rows(
        lambda *tensors: CONTRACT.reference(*tensors, ignore_index, *options),
        *(hidden, weight, targets),
        ignore_index,
    )
    return result


IMPLEMENTATION = on_cpu(CONTRACT, linear_cross_entropy, MERIT, pays_from=0)
