"""Losses and log-probabilities computed only for rows that are not ignored.

In fine-tuning with masked prompts most rows may be ignored; they cost nothing here. On an
accelerator the number of rows would need a synchronization, on the CPU it does not.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ms_kernels.backends.cpu import on_cpu
from ms_kernels.contracts.call import accumulator
from ms_kernels.operators.linear_cross_entropy.contract import CONTRACT

MERIT = "does no work for ignored rows"


def on_valid_rows(
    run: Callable[[Tensor, Tensor, Tensor], Any],
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
) -> Any:
    """Call `run` with only the rows that are not ignored; the results of ignored rows are 0.

    Args:
        run: returns one value per row, a tuple of such tensors, or a scalar.
        hidden: (..., H).
        weight: (V, H).
        targets: (...).
        ignore_index: target value of ignored rows.
    """
    flat = targets.reshape(-1)
    rows = (flat != ignore_index).nonzero().squeeze(-1)
    # Copying hidden pays only if at least one row in sixteen is ignored.
    if len(rows) > flat.numel() - flat.numel() // 16:
        return run(hidden, weight, targets)
    counted_hidden = hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows)
    result = run(counted_hidden, weight, flat[rows])
    empty = hidden.new_zeros(flat.shape, dtype=accumulator(hidden.dtype))

    def scatter(values: Tensor) -> Tensor:
        return empty.index_copy(0, rows, values).view(targets.shape) if values.ndim else values

    return tuple(map(scatter, result)) if isinstance(result, tuple) else scatter(result)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, *options: Any
) -> Tensor:
    """Return `cross_entropy` of ``hidden @ weight.T``."""
    result: Tensor = on_valid_rows(
        lambda *tensors: CONTRACT.reference(*tensors, ignore_index, *options),
        *(hidden, weight, targets),
        ignore_index,
    )
    return result


IMPLEMENTATION = on_cpu(CONTRACT, linear_cross_entropy, MERIT, pays_from=0)
