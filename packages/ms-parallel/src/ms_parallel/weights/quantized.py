"""Dequantization of checkpoint folders with FP8 or MXFP4 matrices.

- FP8 (DeepSeek-V3, Qwen3-FP8): `X.weight` in 8-bit floats, and one factor per block of it in
  `X.weight_scale_inv`, which is multiplied despite its name.
- MXFP4 (gpt-oss): `X_blocks` (experts, rows, groups, 16) with two 4-bit floats per byte, the low
  half first, and `X_scales` (experts, rows, groups), the biased exponent (+127) of each group of 32
  values. They hold the transpose of the tensor `X` (experts, columns, rows).

Values are computed in float32, one part at a time, like in transformers.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ms_parallel.errors import ModelError
from ms_parallel.files.untrusted import read_json
from ms_parallel.models.config_keys import Quantization, quantization_of
from ms_parallel.models.registry import CONFIG
from ms_parallel.weights.folder import WeightFolder

_SCALES = "_scale_inv"
_GROUP = 32
"""Values of MXFP4 per scale."""
_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def open_weights(folder: Path) -> WeightFolder:
    """Open the weights of a folder in the format that its config.json declares.

    Raises:
        ModelError: the folder has no weights, or their format is not supported.
    """
    path = folder / CONFIG
    document = read_json(path, dict[str, Any], error=ModelError) if os.path.lexists(path) else {}
    quantization = quantization_of(document)
    if quantization is None:
        return WeightFolder(folder)
    if quantization.method == "fp8":
        return _FP8(folder, quantization)
    return _MXFP4(folder)


class _FP8(WeightFolder):
    def __init__(self, folder: Path, quantization: Quantization) -> None:
        super().__init__(folder)
        self.block = quantization.block
        all_names = super().names
        self.scaled = {name for name in all_names if name + _SCALES in all_names}

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors except the factors."""
        return super().names - {name + _SCALES for name in self.scaled}

    def shape(self, name: str) -> tuple[int, ...]:
        """Read the shape of a tensor, and check that it has one factor per block."""
        dtype = self._slice(name).get_dtype()
        if name not in self.scaled and dtype != "F8_E4M3":
            return super().shape(name)
        if name not in self.scaled:
            raise ModelError(
                f"{self.folder} has {name!r} in FP8 without its {name + _SCALES!r}; is it complete?"
            )
        shape = tuple(self._slice(name).get_shape())
        expected = tuple(-(-size // block) for size, block in zip(shape, self.block, strict=False))
        factor_shape = super().shape(name + _SCALES)
        if dtype != "F8_E4M3" or len(shape) != 2 or factor_shape != expected:
            raise ModelError(
                f"{self.folder} has {name!r} as {dtype} of shape {shape} with factors of shape"
                f" {factor_shape}; supported: F8_E4M3 in blocks of {self.block}, one factor each"
            )
        return shape

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Read only the part of a tensor inside a box; FP8 is returned as float32."""
        values = super().read(name, box)
        if name not in self.scaled:
            return values
        # Blocks that overlap the box.
        blocks = tuple(
            slice(dim.start // block, -(-dim.stop // block))
            for dim, block in zip(box, self.block, strict=True)
        )
        factors = super().read(name + _SCALES, blocks).float()  # (row blocks, column blocks)
        # Block index of each row and column, relative to the first block that was read.
        row, column = (
            torch.arange(dim.start, dim.stop, dim.step or 1) // block - factor_slice.start
            for dim, block, factor_slice in zip(box, self.block, blocks, strict=True)
        )
        return values.float() * factors[row[:, None], column]


class _MXFP4(WeightFolder):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        suffixes = "_blocks", "_scales"
        all_names = super().names
        stems = {name.removesuffix(suffixes[0]) for name in all_names if name.endswith(suffixes[0])}
        self.packed = {stem for stem in stems if stem + suffixes[1] in all_names}
        self._parts = frozenset(stem + suffix for stem in self.packed for suffix in suffixes)

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors; one name per pair of blocks and scales."""
        return (super().names - self._parts) | self.packed

    def shape(self, name: str) -> tuple[int, ...]:
        """Read the shape of a tensor, and check that its blocks and scales match."""
        if name not in self.packed:
            return super().shape(name)
        blocks, scales = self._slice(f"{name}_blocks"), self._slice(f"{name}_scales")
        shape, dtypes = tuple(blocks.get_shape()), {blocks.get_dtype(), scales.get_dtype()}
        fits = (
            len(shape) == 4 and shape[3] == _GROUP // 2 and shape[:3] == tuple(scales.get_shape())
        )
        if dtypes != {"U8"} or not fits:
            raise ModelError(
                f"{self.folder} has {name + '_blocks'!r} of shape {shape} and scales of shape"
                f" {tuple(scales.get_shape())} as {', '.join(sorted(dtypes))}; MXFP4 needs U8 of"
                " (experts, rows, groups, 16) and (experts, rows, groups)"
            )
        experts, rows, groups, _ = shape
        return experts, groups * _GROUP, rows

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Read only the part of a tensor inside a box; MXFP4 is returned as float32."""
        if name not in self.packed:
            return super().read(name, box)
        # X is stored transposed: dim 2 counts its stored rows, dim 1 the values of the groups.
        experts, columns, rows = box
        groups = slice(columns.start // _GROUP, -(-columns.stop // _GROUP))
        part = experts, rows, groups
        packed = super().read(f"{name}_blocks", (*part, slice(0, _GROUP // 2)))
        powers = super().read(f"{name}_scales", part).to(torch.int32) - 127
        table = torch.tensor([*_FOUR_BITS, *(-value for value in _FOUR_BITS)])
        halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)  # (..., groups, 32)
        # value · 2^power
        values = torch.ldexp(table[halves.to(torch.int64)], powers[..., None]).flatten(-2)
        # Whole groups were read; cut to the columns of the box.
        first = groups.start * _GROUP
        column_slice = slice(columns.start - first, columns.stop - first, columns.step)
        return values[..., column_slice].transpose(1, 2)
