"""Matrix products of all experts in one launch, without synchronizing to read the counts."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ms_kernels.backends.triton.configuration import (
    MATRIX_TILES,
    MATRIX_TILES_BACKWARD,
    tile,
    tuned_kernels,
)
from ms_kernels.backends.triton.implementation import on_gpu
from ms_kernels.backends.triton.launching import blocks, launch, power_of_two
from ms_kernels.backends.triton.rows import empty, with_unit_stride
from ms_kernels.contracts.call import Call
from ms_kernels.core.entries import DTYPES, Entry, entry
from ms_kernels.core.launches import ANY_SIZE, TableKey, key_of
from ms_kernels.core.plan import absent_grad, needs_grad
from ms_kernels.operators.grouped_matmul.contract import CONTRACT

MAX_EXPERTS = 1024
"""Maximum number of experts: every program reads all counts."""

_HALF, _SINGLE = {"num_warps": 4, "num_stages": 3}, {"num_warps": 8, "num_stages": 3}
_TRIED_AT = ({"T": 16384, "E": 8, "K": 2048, "N": 7168},)
(ROWS,) = tuned_kernels(
    "grouped_matmul",
    "grouped_rows",
    tried_at=_TRIED_AT,
    candidates=MATRIX_TILES,
    defaults=((ANY_SIZE, {"BM": 64, "BN": 128, "BK": 32, **_HALF}),),
    wide_defaults=((ANY_SIZE, {"BM": 32, "BN": 64, "BK": 16, **_SINGLE}),),
)
(WEIGHTS,) = tuned_kernels(
    "grouped_matmul",
    "grouped_weights",
    tried_at=_TRIED_AT,
    candidates=MATRIX_TILES_BACKWARD,
    defaults=((ANY_SIZE, {"BM": 32, "BN": 128, "BK": 64, **_HALF}),),
    wide_defaults=((ANY_SIZE, {"BM": 16, "BN": 64, "BK": 32, **_SINGLE}),),
)
TUNED = ROWS, WEIGHTS
GROUPED_ROWS, GROUPED_WEIGHTS = (f"{__package__}.kernels.{kernel.name}" for kernel in TUNED)


def _forward(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    # The ends of the experts' rows stay on the device: reading them would synchronize.
    return _by_expert(x, weights, counts.cumsum(0).to(torch.int32))


def _backward(
    grad: Tensor, x: Tensor, weights: Tensor, counts: Tensor, grad_mask: int
) -> tuple[Tensor, Tensor]:
    ends = counts.cumsum(0).to(torch.int32)
    grad_x, grad_weights = absent_grad(x), absent_grad(weights)
    if needs_grad(grad_mask, 0):
        grad_x = _by_expert(grad, weights.transpose(1, 2), ends)  # (T, N) x (E, N, K) -> (T, K)
    if needs_grad(grad_mask, 1):
        grad_weights, x = empty(weights), with_unit_stride(x)
        constants = WEIGHTS.values(key_of(x))
        experts, width, out_width = weights.shape
        tiles = experts * blocks(width, constants["BK"]) * blocks(out_width, constants["BN"])
        sizes = (len(x), width, out_width, x.stride(0), grad.stride(0))
        launch(GROUPED_WEIGHTS, tiles, x, x, grad, ends, grad_weights, *sizes, **constants)
    return grad_x, grad_weights


def _by_expert(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows (T, K) by their experts' matrices (E, K, N), which may have any strides."""
    x = with_unit_stride(x)
    experts, width, out_width = weights.shape
    result = x.new_empty((len(x), out_width))
    constants = tile(ROWS, key_of(x), len(x))
    launch(
        GROUPED_ROWS,
        # Every expert may end with a partly filled block, hence `+ experts`.
        (blocks(len(x), constants["BM"]) + experts) * blocks(out_width, constants["BN"]),
        x,
        *(x, weights, ends, result, len(x), experts, width, out_width),
        *(x.stride(0), *weights.stride()),
        EXPERTS=power_of_two(experts),
        **constants,
    )
    return result


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield the kernels of an ahead-of-time library, for up to 128 experts."""
    key, widths = TableKey(chip, DTYPES[dtype]), {"width": "65536", "out_width": "65536"}
    yield entry(
        "grouped_matmul",
        GROUPED_ROWS,
        dtype,
        "",
        {**ROWS.values(key), "EXPERTS": 128},
        "(cdiv(rows, BM) + experts) * cdiv(out_width, BN)",
        i32="ENDS",
        limits={"experts": "EXPERTS", **widths},
    )
    yield entry(
        "grouped_matmul",
        GROUPED_WEIGHTS,
        dtype,
        "",
        WEIGHTS.values(key),
        "experts * cdiv(width, BK) * cdiv(out_width, BN)",
        i32="ENDS",
        limits=widths,
        extra=("experts",),
    )


def _refuses(call: Call) -> str | None:
    """Decline more experts than a program can read."""
    count = call.present[1].shape[0]
    return f"supports up to {MAX_EXPERTS} experts, not {count}" if count > MAX_EXPERTS else None


IMPLEMENTATION = on_gpu(
    CONTRACT,
    "all experts in one launch, without waiting for their counts",
    tuned=TUNED,
    entries=entries,
    refuses=_refuses,
    forward=_forward,
    backward=_backward,
    saves=("x", "weights", "counts"),
)
