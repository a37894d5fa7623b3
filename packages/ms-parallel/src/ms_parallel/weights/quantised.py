"""Reads folders whose matrices are held in FP8 or MXFP4, as the numbers that these stand for.

- FP8 (DeepSeek-V3, Qwen3-FP8): `X.weight` of 8-bit floats, and a factor for each block of it in
  `X.weight_scale_inv`, which is multiplied in spite of its name.
- MXFP4 (gpt-oss): `X_blocks` (experts, rows, groups, 16) of two 4-bit floats a byte, the low half
  first, and `X_scales` (experts, rows, groups), the power of two, plus 127, of 32 of them. They
  stand for a tensor `X` (experts, columns, rows): transposed.

Values are made in float32, a part at a time; a power of two and a float32 factor of an 8-bit float
are what transformers computes too.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ms_parallel.errors import ModelError
from ms_parallel.files.untrusted import read_json
from ms_parallel.models.config_keys import Quantisation, quantisation_of
from ms_parallel.models.registry import CONFIG
from ms_parallel.weights.folder import WeightFolder

_SCALES = "_scale_inv"
_GROUP = 32
"""Values of MXFP4 that share a power of two."""
_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def open_weights(folder: Path) -> WeightFolder:
    """Open the weights of a folder, held as its config.json says.

    Raises:
        ModelError: there are none, or they are held in a way that is not known.
    """
    path = folder / CONFIG
    document = read_json(path, dict[str, Any], error=ModelError) if os.path.lexists(path) else {}
    quantisation = quantisation_of(document)
    if quantisation is None:
        return WeightFolder(folder)
    if quantisation.method == "fp8":
        return _FP8(folder, quantisation)
    return _MXFP4(folder)


class _FP8(WeightFolder):
    def __init__(self, folder: Path, quantisation: Quantisation) -> None:
        super().__init__(folder)
        self.block = quantisation.block
        held = super().names
        self.scaled = {name for name in held if name + _SCALES in held}

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors but factors."""
        return super().names - {name + _SCALES for name in self.scaled}

    def shape(self, name: str) -> tuple[int, ...]:
        """Read the shape of a tensor; check that it has as many factors as blocks."""
        held = self._slice(name).get_dtype()
        if name not in self.scaled and held != "F8_E4M3":
            return super().shape(name)
        if name not in self.scaled:
            raise ModelError(
                f"{self.folder} holds {name!r} in FP8 without its {name + _SCALES!r}; is it"
                " complete?"
            )
        shape = tuple(self._slice(name).get_shape())
        wanted = tuple(-(-size // of) for size, of in zip(shape, self.block, strict=False))
        found = super().shape(name + _SCALES)
        if held != "F8_E4M3" or len(shape) != 2 or found != wanted:
            raise ModelError(
                f"{self.folder} holds {name!r} as {held} of shape {shape} with factors of shape"
                f" {found}; supported: F8_E4M3 in blocks of {self.block}, one factor each"
            )
        return shape

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Read the part of a tensor inside a box, in float32 where it was in FP8."""
        values = super().read(name, box)
        if name not in self.scaled:
            return values
        blocks = tuple(
            slice(dim.start // of, -(-dim.stop // of))
            for dim, of in zip(box, self.block, strict=True)
        )
        factors = super().read(name + _SCALES, blocks).float()
        row, column = (
            torch.arange(dim.start, dim.stop, dim.step or 1) // of - own.start
            for dim, of, own in zip(box, self.block, blocks, strict=True)
        )
        return values.float() * factors[row[:, None], column]


class _MXFP4(WeightFolder):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        ends = "_blocks", "_scales"
        held = super().names
        stems = {name.removesuffix(ends[0]) for name in held if name.endswith(ends[0])}
        self.packed = {stem for stem in stems if stem + ends[1] in held}
        self._parts = frozenset(stem + end for stem in self.packed for end in ends)

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors; one name for a packed pair."""
        return (super().names - self._parts) | self.packed

    def shape(self, name: str) -> tuple[int, ...]:
        """Read the shape of a tensor; check that its two parts fit each other."""
        if name not in self.packed:
            return super().shape(name)
        blocks, scales = self._slice(f"{name}_blocks"), self._slice(f"{name}_scales")
        shape, held = tuple(blocks.get_shape()), {blocks.get_dtype(), scales.get_dtype()}
        fits = (
            len(shape) == 4 and shape[3] == _GROUP // 2 and shape[:3] == tuple(scales.get_shape())
        )
        if held != {"U8"} or not fits:
            raise ModelError(
                f"{self.folder} holds {name + '_blocks'!r} of shape {shape} and scales of shape"
                f" {tuple(scales.get_shape())} as {', '.join(sorted(held))}; MXFP4 has U8 of"
                " (experts, rows, groups, 16) and (experts, rows, groups)"
            )
        experts, rows, groups, _ = shape
        return experts, groups * _GROUP, rows

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Read the part of a tensor inside a box, in float32 where it was packed."""
        if name not in self.packed:
            return super().read(name, box)
        experts, columns, rows = box
        groups = slice(columns.start // _GROUP, -(-columns.stop // _GROUP))
        part = experts, rows, groups
        packed = super().read(f"{name}_blocks", (*part, slice(0, _GROUP // 2)))
        powers = super().read(f"{name}_scales", part).to(torch.int32) - 127
        table = torch.tensor([*_FOUR_BITS, *(-value for value in _FOUR_BITS)])
        halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)  # (..., groups, 32)
        values = torch.ldexp(table[halves.to(torch.int64)], powers[..., None]).flatten(-2)
        first = groups.start * _GROUP
        own = slice(columns.start - first, columns.stop - first, columns.step)
        return values[..., own].transpose(1, 2)
