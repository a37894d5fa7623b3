"""Byte layout of ggml's blocks, which store the codes and scales of 32 or 256 weights of a row.

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
"""Magnitudes of E2M1 times 2, by their three bits."""


def pack(value: QuantizedWeight) -> Bytes:
    """Pack a quantized weight into rows of blocks, (N, bytes per row)."""
    scheme = value.scheme
    assert scheme.format is not None
    blocks = _PACKERS[scheme.format](value)
    return blocks.reshape(len(value.codes), -1)


def block_size(scheme: Scheme) -> int:
    """Return the number of weights per block."""
    assert scheme.group_size is not None
    return scheme.group_size if scheme.super_block is None else scheme.super_block.size


def _codes(value: QuantizedWeight) -> npt.NDArray[np.int8]:
    """Return codes as int8, (B, weights per block)."""
    codes: npt.NDArray[np.int8] = value.codes.view(-1, block_size(value.scheme)).numpy()
    return codes


def _bytes(scales: Tensor, value: QuantizedWeight) -> Bytes:
    """View scales as bytes, with a row per block."""
    blocks = value.codes.numel() // block_size(value.scheme)
    return scales.contiguous().numpy().view(np.uint8).reshape(blocks, -1)


def _q8_0(value: QuantizedWeight) -> Bytes:
    # struct block_q8_0: d (2 bytes), 32 int8 codes
    return np.concatenate([_bytes(value.scales, value), _codes(value).view(np.uint8)], axis=1)


def _q4_0(value: QuantizedWeight) -> Bytes:
    # struct block_q4_0: d (2 bytes), 32 nibbles with an offset of 8
    unsigned = (_codes(value) + 8).astype(np.uint8)
    return np.concatenate([_bytes(value.scales, value), _nibbles(unsigned)], axis=1)


def _iq4_nl(value: QuantizedWeight) -> Bytes:
    assert value.scheme.values is not None
    # struct block_iq4_nl: d (2 bytes), 32 nibbles that index the table of values
    index = np.searchsorted(np.array(value.scheme.values), _codes(value)).astype(np.uint8)
    return np.concatenate([_bytes(value.scales, value), _nibbles(index)], axis=1)


def _mxfp4(value: QuantizedWeight) -> Bytes:
    # struct block_mxfp4: E8M0 exponent (1 byte), 32 nibbles of E2M1 (sign in bit 3). -0 has a sign.
    codes = value.codes.float().view(-1, block_size(value.scheme)).numpy()
    magnitude = np.searchsorted(np.array(E2M1_DOUBLED), 2 * np.abs(codes))
    bits = (magnitude | (np.signbit(codes) << 3)).astype(np.uint8)
    exponents = _bytes(value.scales.view(torch.uint8), value)
    return np.concatenate([exponents, _nibbles(bits)], axis=1)


def _q2_k(value: QuantizedWeight) -> Bytes:
    # struct block_q2_K: 16 bytes of scale and minimum nibbles, 64 of codes, d and dmin
    scales, minimums = _group_integers(value)
    return np.concatenate(
        [scales | (minimums << 4), _two_bits(_unsigned(value)), _super_scales(value)], axis=1
    )


def _q3_k(value: QuantizedWeight) -> Bytes:
    # struct block_q3_K: 32 bytes of high bits, 64 of low two bits, 12 of 6-bit scales, d
    codes = _unsigned(value)
    scales = _bytes(value.scales, value) + np.uint8(32)  # (B, 16), modulo 256: 0 to 63
    low = (scales[:, :8] & 15) | ((scales[:, 8:] & 15) << 4)  # (B, 8)
    high = (scales >> 4).reshape(-1, 4, 4)  # (B, position in the byte, byte)
    packed = high[:, 0] | (high[:, 1] << 2) | (high[:, 2] << 4) | (high[:, 3] << 6)
    parts = [_one_bit(codes >> 2), _two_bits(codes & 3), low, packed, _super_scales(value)]
    return np.concatenate(parts, axis=1)


def _q4_k(value: QuantizedWeight) -> Bytes:
    # struct block_q4_K: d and dmin, 12 bytes of 6-bit scales and minimums, 128 of nibbles
    return np.concatenate(
        [_super_scales(value), _six_bits(value), _nibbles(_unsigned(value), 64)], axis=1
    )


def _q5_k(value: QuantizedWeight) -> Bytes:
    # struct block_q5_K: as Q4_K, with 32 bytes of fifth bits before the nibbles
    codes = _unsigned(value)
    return np.concatenate(
        [_super_scales(value), _six_bits(value), _one_bit(codes >> 4), _nibbles(codes & 15, 64)],
        axis=1,
    )


def _q6_k(value: QuantizedWeight) -> Bytes:
    # struct block_q6_K: 128 bytes of low nibbles, 64 of high two bits, 16 int8 scales, d
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
    """Return codes minus the lowest code, (B, weights per block) uint8."""
    return (_codes(value).astype(np.int16) - value.scheme.low).astype(np.uint8)


def _super_scales(value: QuantizedWeight) -> Bytes:
    """Return the bytes of d, followed by dmin for schemes with minimums."""
    assert value.super_scales is not None
    return _bytes(value.super_scales, value)


def _group_integers(value: QuantizedWeight) -> tuple[Bytes, Bytes]:
    """Return the integer scales and minimums, (B, groups per block) each."""
    assert value.zeros is not None
    return _bytes(value.scales, value), _bytes(value.zeros, value)


def _nibbles(codes: Bytes, run: int = 32) -> Bytes:
    """Pack codes below 16: in each run, the first half in low nibbles, the second half in high."""
    halves = codes.reshape(len(codes), -1, 2, run // 2)  # (B, runs, half, byte)
    packed: Bytes = halves[:, :, 0] | (halves[:, :, 1] << 4)
    return packed.reshape(len(codes), -1)


def _two_bits(codes: Bytes) -> Bytes:
    """Pack codes below 4: in each run of 128, byte l has codes l, l + 32, l + 64 and l + 96."""
    runs = codes.reshape(len(codes), 2, 4, 32)  # (B, run, position in the byte, byte)
    packed = runs[:, :, 0] | (runs[:, :, 1] << 2) | (runs[:, :, 2] << 4) | (runs[:, :, 3] << 6)
    result: Bytes = packed.reshape(len(codes), 64)
    return result


def _one_bit(codes: Bytes) -> Bytes:
    """Pack codes below 2: bit i of byte l has code 32 i + l."""
    bits: Bytes = np.packbits(codes.reshape(len(codes), 8, 32), axis=1, bitorder="little")
    return bits[:, 0]


def _six_bits(value: QuantizedWeight) -> Bytes:
    """Pack eight scales and eight minimums below 64 into 12 bytes.

    Bytes 0 to 3 have scales 0 to 3, and bytes 4 to 7 have minimums 0 to 3, in their low six bits.
    Bytes 8 to 11 have the low nibbles of scales and minimums 4 to 7; their high two bits are in the
    high bits of bytes 0 to 7.
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
