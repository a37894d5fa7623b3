"""Linear layer that reads its weight in 4 or 8 bits and unpacks it in registers."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from torch import Tensor

from ms_kernels.backends.triton.configuration import (
    MATRIX_TILES,
    MATRIX_TILES_BACKWARD,
    tile,
    tuned_kernels,
)
from ms_kernels.backends.triton.implementation import on_gpu
from ms_kernels.backends.triton.launching import blocks, launch, power_of_two
from ms_kernels.backends.triton.rows import as_rows
from ms_kernels.core.entries import DTYPES, Entry, entry
from ms_kernels.core.launches import ANY_SIZE, TableKey, TunedKernel, key_of
from ms_kernels.operators.quantized_linear.contract import CONTRACT

_HALF, _SINGLE = {"num_warps": 4, "num_stages": 3}, {"num_warps": 8, "num_stages": 3}
_TRIED_AT = tuple(
    {"...": rows, "K": 4096, "P": 2048, "G": 128, "N": 14336} for rows in (16, 64, 2048)
)
(FORWARD,) = tuned_kernels(
    "quantized_linear",
    "quantized_forward",
    sizes="...",
    tried_at=_TRIED_AT,
    candidates=MATRIX_TILES,
    defaults=((ANY_SIZE, {"BM": 64, "BN": 128, "BK": 32, **_HALF}),),
    wide_defaults=((ANY_SIZE, {"BM": 32, "BN": 64, "BK": 16, **_SINGLE}),),
)
(BACKWARD,) = tuned_kernels(
    "quantized_linear",
    "quantized_backward",
    sizes="...",
    tried_at=_TRIED_AT,
    candidates=MATRIX_TILES_BACKWARD,
    defaults=((ANY_SIZE, {"BM": 64, "BN": 32, "BK": 128, **_HALF}),),
    wide_defaults=((ANY_SIZE, {"BM": 32, "BN": 16, "BK": 64, **_SINGLE}),),
)
TUNED = FORWARD, BACKWARD


def _forward(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group_size: int
) -> Tensor:
    rows, out = as_rows(x), x.new_empty((*x.shape[:-1], packed.shape[0]))
    constants = tile(FORWARD, key_of(rows), len(rows))
    # The kernel loops over one group at a time, so a larger block would be partly masked.
    constants["BK"] = min(max(power_of_two(group_size), 16), constants["BK"])
    tiles = blocks(len(rows), constants["BM"]) * blocks(packed.shape[0], constants["BN"])
    _launch(FORWARD, tiles, rows, (packed, scales, zeros), out, bits, constants)
    return out


def _backward(
    grad: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, grad_mask: int, *form: int
) -> Tensor:
    bits, _ = form
    rows, out = as_rows(grad), _fake_backward(grad, packed, scales, zeros, grad_mask, *form)
    constants = tile(BACKWARD, key_of(rows), len(rows))
    tiles = blocks(len(rows), constants["BM"]) * blocks(out.shape[-1], constants["BK"])
    _launch(BACKWARD, tiles, rows, (packed, scales, zeros), out, bits, constants)
    return out


def _fake_backward(
    grad: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, grad_mask: int, *form: int
) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], packed.shape[1] * 8 // form[0]))


def _launch(
    kernel: TunedKernel,
    tiles: int,
    rows: Tensor,
    weight: tuple[Tensor, Tensor, Tensor | None],
    out: Tensor,
    bits: int,
    constants: dict[str, Any],
) -> None:
    packed, scales, zeros = weight
    # 8 / bits codes per byte.
    width, groups = packed.shape[1] * 8 // bits, scales.shape[1]
    scales = scales.contiguous()
    launch(
        f"{__package__}.kernels.{kernel.name}",
        tiles,
        rows,
        *(rows, packed.contiguous(), scales, scales if zeros is None else zeros.contiguous(), out),
        *(len(rows), width, packed.shape[0], groups, width // groups, rows.stride(0)),
        BITS=bits,
        ZEROED=zeros is not None,
        **constants,
    )


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield the kernels of an ahead-of-time library: 4 and 8 bits, few and many rows."""
    tiles = "cdiv(rows, BM) * cdiv(out_width, BN)", "cdiv(rows, BM) * cdiv(width, BK)"
    sizes = (16, "few"), (2**20, "many")
    for bits, zeroed, (rows, size) in product((4, 8), (False, True), sizes):
        for kernel, count in zip(TUNED, tiles, strict=True):
            constants = tile(kernel, TableKey(chip, DTYPES[dtype]), rows)
            yield entry(
                "quantized_linear",
                f"{__package__}.kernels.{kernel.name}",
                dtype,
                f"{bits}{'_zeros' * zeroed}_{size}",
                {**constants, "BITS": bits, "ZEROED": zeroed},
                count,
                fp32="SCALES ZEROS",
                u8="PACKED",
            )


IMPLEMENTATION = on_gpu(
    CONTRACT,
    "reads packed codes and unpacks them in registers",
    tuned=TUNED,
    entries=entries,
    forward=_forward,
    backward=_backward,
    fake_backward=_fake_backward,
    saves=("packed", "scales", "zeros"),
)
