"""Blocks of ggml's types: the bytes that store codes and scales of 32 or 256 weights of a row.

Sources: the structs of ggml-common.h, read by `dequantize_row_*` of ggml-quants.c and by the gguf
library's `dequantize_blocks`. All functions return (B, bytes) uint8 for B blocks.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ms_compress.quantization.rounding import QuantizedWeight
from ms_compress.quantization.scheme import Scheme

Bytes = npt.NDArray[Any]
"""Array of uint8."""
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the magnitudes of E2M1, in the order of their bits."""


def pack(value: QuantizedWeight) -> Bytes:
    """Pack a quantized weight into its rows of blocks, (N, bytes of a row)."""
    scheme = value.scheme
    assert scheme.format is not None
    blocks = _PACKERS[scheme.format](value)
    return blocks.reshape(len(value.codes), -1)


def block_size(scheme: Scheme) -> int:
    """Return the number of weights of a block."""
    assert scheme.group_size is not None
    return scheme.group_size if scheme.super_block is None else scheme.super_block.size


def _codes(value: QuantizedWeight) -> npt.NDArray[np.int8]:
    """Return codes (B, weights of a block), as int8."""
    codes: npt.NDArray[np.int8] = value.codes.view(-1, block_size(value.scheme)).numpy()
    return codes


def _bytes(scales: Tensor, value: QuantizedWeight) -> Bytes:
    """Return scales as bytes, a row per block."""
    blocks = value.codes.numel() // block_size(value.scheme)
    return scales.contiguous().numpy().view(np.uint8).reshape(blocks, -1)


def _q8_0(value: QuantizedWeight) -> Bytes:
    return np.concatenate([_bytes(value.scales, value), _codes(value).view(np.uint8)], axis=1)


def _q4_0(value: QuantizedWeight) -> Bytes:
    unsigned = (_codes(value) + 8).astype(np.uint8)
    return np.concatenate([_bytes(value.scales, value), _nibbles(unsigned)], axis=1)


def _iq4_nl(value: QuantizedWeight) -> Bytes:
    assert value.scheme.values is not None
    index = np.searchsorted(np.array(value.scheme.values), _codes(value)).astype(np.uint8)
    return np.concatenate([_bytes(value.scales, value), _nibbles(index)], axis=1)


def _mxfp4(value: QuantizedWeight) -> Bytes:
    codes = value.codes.float().view(-1, block_size(value.scheme)).numpy()
    magnitude = np.searchsorted(np.array(E2M1_DOUBLED), 2 * np.abs(codes))
    bits = (magnitude | (np.signbit(codes) << 3)).astype(np.uint8)
    exponents = _bytes(value.scales.view(torch.uint8), value)
    return np.concatenate([exponents, _nibbles(bits)], axis=1)


def _q2_k(value: QuantizedWeight) -> Bytes:
    scales, minimums = _group_integers(value)
    return np.concatenate(
        [scales | (minimums << 4), _two_bits(_unsigned(value)), _super_scales(value)], axis=1
    )


def _q3_k(value: QuantizedWeight) -> Bytes:
    codes = _unsigned(value)
    scales = _bytes(value.scales, value) + np.uint8(32)  # (B, 16), modulo 256: 0 to 63
    low = (scales[:, :8] & 15) | ((scales[:, 8:] & 15) << 4)
    high = (scales >> 4).reshape(-1, 4, 4)  # (B, two bits of a byte, byte)
    packed = high[:, 0] | (high[:, 1] << 2) | (high[:, 2] << 4) | (high[:, 3] << 6)
    parts = [_one_bit(codes >> 2), _two_bits(codes & 3), low, packed, _super_scales(value)]
    return np.concatenate(parts, axis=1)


def _q4_k(value: QuantizedWeight) -> Bytes:
    return np.concatenate(
        [_super_scales(value), _six_bits(value), _nibbles(_unsigned(value), 64)], axis=1
    )


def _q5_k(value: QuantizedWeight) -> Bytes:
    codes = _unsigned(value)
    return np.concatenate(
        [_super_scales(value), _six_bits(value), _one_bit(codes >> 4), _nibbles(codes & 15, 64)],
        axis=1,
    )


def _q6_k(value: QuantizedWeight) -> Bytes:
    codes = _unsigned(value)
    return np.concatenate(
        [
            _nibbles(codes & 15, 128),
            _two_bits(codes >> 4),
            _bytes(value.scales, value),
            _super_scales(value),
        ],
        axis=1,
    )


_PACKERS: dict[str, Callable[[QuantizedWeight], Bytes]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _unsigned(value: QuantizedWeight) -> Bytes:
    """Return codes counted from the smallest one, (B, weights)."""
    return (_codes(value).astype(np.int16) - value.scheme.low).astype(np.uint8)


def _super_scales(value: QuantizedWeight) -> Bytes:
    """Return d, and dmin if there are minimums, as bytes."""
    assert value.super_scales is not None
    return _bytes(value.super_scales, value)


def _group_integers(value: QuantizedWeight) -> tuple[Bytes, Bytes]:
    """Return the scales and minimums of each block's groups, (B, groups) each."""
    assert value.zeros is not None
    return _bytes(value.scales, value), _bytes(value.zeros, value)


def _nibbles(codes: Bytes, run: int = 32) -> Bytes:
    """Pack codes below 16: of each `run`, the first half in low and the second in high nibbles."""
    halves = codes.reshape(len(codes), -1, 2, run // 2)
    packed: Bytes = halves[:, :, 0] | (halves[:, :, 1] << 4)
    return packed.reshape(len(codes), -1)


def _two_bits(codes: Bytes) -> Bytes:
    """Pack codes below 4: of each 128, byte l has codes l, l + 32, l + 64 and l + 96."""
    runs = codes.reshape(len(codes), 2, 4, 32)
    packed = runs[:, :, 0] | (runs[:, :, 1] << 2) | (runs[:, :, 2] << 4) | (runs[:, :, 3] << 6)
    result: Bytes = packed.reshape(len(codes), 64)
    return result


def _one_bit(codes: Bytes) -> Bytes:
    """Pack codes below 2: bit i of byte l is code 32 i + l."""
    bits: Bytes = np.packbits(codes.reshape(len(codes), 8, 32), axis=1, bitorder="little")
    return bits[:, 0]


def _six_bits(value: QuantizedWeight) -> Bytes:
    """Pack eight scales and eight minimums below 64 into 12 bytes.

    Bytes 0 to 3 have scales 0 to 3, bytes 4 to 7 the minimums, and bytes 8 to 11 the low nibbles of
    scales and minimums 4 to 7, whose two high bits are above the first ones.
    """
    scales, minimums = _group_integers(value)
    return np.concatenate(
        [
            scales[:, :4] | (scales[:, 4:] >> 4 << 6),
            minimums[:, :4] | (minimums[:, 4:] >> 4 << 6),
            (scales[:, 4:] & 15) | ((minimums[:, 4:] & 15) << 4),
        ],
        axis=1,
    )
