"""A linear layer that reads its weight in 4 or 8 bits and unpacks it in registers."""

from typing import Any

from torch import Tensor

from ms_kernels.library import opaque
from ms_kernels.reference import CONTRACTS
from ms_kernels.triton import configuration
from ms_kernels.triton.launching import blocks, launch, power_of_two
from ms_kernels.triton.rows import as_rows

__all__ = ["quantized_linear"]


def _forward(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group_size: int
) -> Tensor:
    rows, out = as_rows(x), _fake(x, packed, scales, zeros, bits, group_size)
    constants = _tile("quantized_forward", rows)
    constants["BK"] = min(max(power_of_two(group_size), 16), constants["BK"])
    tiles = blocks(len(rows), constants["BM"]) * blocks(packed.shape[0], constants["BN"])
    _launch("quantized_forward", tiles, rows, packed, scales, zeros, out, bits, constants)
    return out


def _fake(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group_size: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


def _backward(
    grad: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    wanted: int,
    bits: int,
    group_size: int,
) -> Tensor:
    rows, out = as_rows(grad), _fake_backward(grad, packed, scales, zeros, wanted, bits, group_size)
    constants = _tile("quantized_backward", rows)
    tiles = blocks(len(rows), constants["BM"]) * blocks(out.shape[-1], constants["BK"])
    _launch("quantized_backward", tiles, rows, packed, scales, zeros, out, bits, constants)
    return out


def _fake_backward(
    grad: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    wanted: int,
    bits: int,
    group_size: int,
) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], packed.shape[1] * 8 // bits))


def _tile(kernel: str, rows: Tensor) -> dict[str, int]:
    return configuration.tile("quantized_linear", kernel, configuration.place_of(rows), len(rows))


def _launch(
    kernel: str,
    tiles: int,
    rows: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    out: Tensor,
    bits: int,
    constants: dict[str, Any],
) -> None:
    width, groups = packed.shape[1] * 8 // bits, scales.shape[1]
    scales = scales.contiguous()
    launch(
        f"quantized_linear.{kernel}",
        tiles,
        rows,
        *(rows, packed.contiguous(), scales, scales if zeros is None else zeros.contiguous(), out),
        *(len(rows), width, packed.shape[0], groups, width // groups, rows.stride(0)),
        BITS=bits,
        ZEROED=zeros is not None,
        **constants,
    )


quantized_linear = opaque(
    CONTRACTS["quantized_linear"],
    "triton",
    forward=_forward,
    fake=_fake,
    backward=_backward,
    fake_backward=_fake_backward,
    saves=("packed", "scales", "zeros"),
)
