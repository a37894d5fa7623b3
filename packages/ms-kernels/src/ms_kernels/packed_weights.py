"""Group-wise quantization of weights to 4 or 8 bits, packed in bytes, and dequantization.

A matrix (N, K) is split along K into groups of `group_size`. A weight is ``(code - zero) · scale``
with a code from 0 to ``2 ** bits - 1`` and one scale and zero per row and group; without zeros, the
zero is ``2 ** (bits - 1)``. 8-bit codes take one byte each, (N, K) uint8. Two 4-bit codes share one
byte, (N, K / 2) uint8: byte j has code 2j in its low half and code 2j + 1 in its high half.
"""

import torch
from torch import Tensor

from ms_kernels.contracts.call import FLOATING, accumulator, describe
from ms_kernels.contracts.values import is_integer
from ms_kernels.errors import ArgumentError, shown

__all__ = ["dequantize", "pack_codes", "quantize", "unpack_codes"]


def pack_codes(codes: Tensor, *, bits: int) -> Tensor:
    """Pack integer codes into bytes.

    Args:
        codes: (N, K) of an integer dtype, each from 0 to ``2 ** bits - 1``.
        bits: 4 or 8; with 4, K is even.

    Returns:
        (N, K · bits / 8) uint8.

    Raises:
        ArgumentError: a code is out of range, or K is odd.
    """
    _check_bits("pack_codes", bits)
    _check_tensor("pack_codes", "codes", codes)
    if codes.ndim != 2 or codes.is_floating_point() or codes.shape[1] * bits % 8:
        got = f"{describe(codes.dtype)} of shape {describe(codes.shape)}"
        even = ", K even" if bits == 4 else ""
        raise ArgumentError("pack_codes", "codes", got, f"integers of shape (N, K){even}")
    if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) >= 2**bits):
        got = f"{int(codes.min())} to {int(codes.max())}"
        raise ArgumentError("pack_codes", "codes", got, f"from 0 to {2**bits - 1}")
    byte_codes = codes.to(torch.uint8)
    return byte_codes if bits == 8 else byte_codes[:, 0::2] | (byte_codes[:, 1::2] << 4)


def unpack_codes(packed: Tensor, *, bits: int) -> Tensor:
    """Return the codes (N, K) uint8 of `packed` (N, K · bits / 8) uint8.

    Raises:
        ArgumentError: `bits` is not 4 or 8, or `packed` is not a uint8 matrix.
    """
    _check_bits("unpack_codes", bits)
    _check_tensor("unpack_codes", "packed", packed)
    if packed.dtype != torch.uint8 or packed.ndim != 2:
        got = f"{describe(packed.dtype)} of shape {describe(packed.shape)}"
        raise ArgumentError("unpack_codes", "packed", got, "uint8 of shape (N, bytes)")
    if bits == 8:
        return packed
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def quantize(
    weight: Tensor, *, bits: int, group_size: int, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round a matrix to the nearest codes, group by group.

    Args:
        weight: (N, K), a floating dtype.
        bits: 4 or 8.
        group_size: number of weights of a row that share a scale; must divide K.
        symmetric: cover [-a, a] with the group's largest magnitude a, without zeros; otherwise
            cover the group's range, extended to include 0.

    Returns:
        packed (N, K · bits / 8) uint8; scales (N, K / group_size) float32; zeros with the shape
        and dtype of scales, or None.

    Raises:
        ArgumentError: an argument is invalid.
    """
    _check_bits("quantize", bits)
    _check_tensor("quantize", "weight", weight)
    if weight.ndim != 2 or weight.dtype not in FLOATING:
        got = f"{describe(weight.dtype)} of shape {describe(weight.shape)}"
        raise ArgumentError("quantize", "weight", got, "floating, of shape (N, K)")
    if not is_integer(group_size, 1) or weight.shape[1] % group_size:
        fits = f"a divisor of {weight.shape[1]}, the weight's second size"
        raise ArgumentError("quantize", "group_size", shown(group_size), fits)
    groups = weight.detach().to(torch.float32)
    # (N, groups, group_size)
    groups = groups.reshape(len(weight), weight.shape[1] // group_size, group_size)
    top = 2**bits - 1
    if symmetric:
        scales = groups.abs().amax(-1) / (2 ** (bits - 1) - 1)  # (N, groups)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (high - low) / top
        # so that weight 0 has an exact code
        zeros = torch.where(scales > 0, -low / scales, 0).round()
    steps = torch.where(scales > 0, scales, 1).unsqueeze(-1)  # an all-zero group has scale 0
    codes = (groups / steps).round() + zeros.unsqueeze(-1)
    packed = pack_codes(codes.clamp(0, top).flatten(1).to(torch.uint8), bits=bits)
    return packed, scales, None if symmetric else zeros


def dequantize(
    packed: Tensor, scales: Tensor, zeros: Tensor | None = None, *, bits: int, group_size: int
) -> Tensor:
    """Dequantize to a matrix (N, K), in the dtype of the scales but at least float32.

    Args:
        packed: (N, K · bits / 8) uint8.
        scales: (N, K / group_size), a floating dtype.
        zeros: (N, K / group_size). None: ``2 ** (bits - 1)``.
        bits: 4 or 8.
        group_size: number of weights of a row that share a scale.

    Raises:
        ArgumentError: `bits` is not 4 or 8, `packed` is not a uint8 matrix, or `group_size` does
            not match the numbers of features and scales.
    """
    _check_bits("dequantize", bits)
    for name, tensor in (("packed", packed), ("scales", scales), ("zeros", zeros)):
        if tensor is not None or name != "zeros":
            _check_tensor("dequantize", name, tensor)
    if packed.ndim != 2 or scales.ndim != 2 or not scales.is_floating_point():
        got = f"{describe(scales.dtype)} of shape {describe(scales.shape)}"
        fits = f"floating, of shape (N, groups), for packed of shape {describe(packed.shape)}"
        raise ArgumentError("dequantize", "scales", got, fits)
    if zeros is not None and zeros.shape != scales.shape:
        fits = f"of the shape of scales, {describe(scales.shape)}"
        raise ArgumentError("dequantize", "zeros", f"of shape {describe(zeros.shape)}", fits)
    features = packed.shape[-1] * 8 // bits
    if not is_integer(group_size, 1) or scales.shape[-1] * group_size != features:
        fits = f"the {features} features of a row divided by its {scales.shape[-1]} scales"
        raise ArgumentError("dequantize", "group_size", shown(group_size), fits)
    wide = accumulator(scales.dtype)
    scales = scales.to(wide).unsqueeze(-1)
    offsets = 2 ** (bits - 1) if zeros is None else zeros.to(wide).unsqueeze(-1)
    codes = unpack_codes(packed, bits=bits).to(wide).reshape(*scales.shape[:2], group_size)
    # (code - zero) · scale in one pass; zero · scale is computed once per group.
    weight: Tensor = torch.addcmul(-offsets * scales, codes, scales).flatten(1)
    return weight


def _check_tensor(operator: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ArgumentError(operator, name, shown(value), "a tensor")


def _check_bits(operator: str, bits: int) -> None:
    if not is_integer(bits) or bits not in (4, 8):
        raise ArgumentError(operator, "bits", shown(bits), "4 or 8")
