"""Reads the weights of a folder of safetensors files by parts.

A folder holds either `model.safetensors`, or several files and `model.safetensors.index.json`.
"""

import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ms_parallel.errors import ModelError
from ms_parallel.files.untrusted import check_file, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LONGEST_NAME = 256
"""What file systems take."""
_DTYPES = ("F64", "F32", "F16", "BF16")


class _Index(msgspec.Struct, frozen=True):
    """`model.safetensors.index.json`."""

    weight_map: dict[str, str]


class WeightFolder:
    """The weights of a folder, opened as they are asked for.

    Raises:
        ModelError: there are no weights, or the index is damaged or names a file outside.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        if os.path.isfile(folder / SINGLE):
            self._files = dict.fromkeys(self._header(SINGLE).keys(), SINGLE)
        elif os.path.isfile(folder / INDEX):
            self._files = self._read_index()
        else:
            raise ModelError(
                f"{folder} holds neither {SINGLE} nor {INDEX}; give a folder of a saved model"
            )

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Read the shape of a tensor from its file's header.

        Raises:
            ModelError: no file holds it, that file is damaged, or its values are not floats.
        """
        found = self._slice(name)
        if found.get_dtype() not in _DTYPES:
            raise ModelError(
                f"{self.folder / self._files[name]} holds {name!r} as {found.get_dtype()}, which is"
                f" not supported; supported: {', '.join(_DTYPES)}"
            )
        return tuple(found.get_shape())

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Read the part of a tensor inside a box, and only that part.

        Raises:
            ModelError: no file holds it, or that file is damaged.
        """
        steps = tuple(slice(None, None, dim.step) for dim in box)
        dense = tuple(slice(dim.start, dim.stop) for dim in box)
        try:
            return self._slice(name)[dense][steps]  # type: ignore[no-any-return]
        except SafetensorError as error:
            raise self._damaged(self._files[name], error) from error

    def _slice(self, name: str) -> Any:
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"{self.folder} holds no tensor {name!r}; is the model complete?")
        try:
            return self._header(file).get_slice(name)
        except SafetensorError as error:
            raise ModelError(
                f"{self.folder / file} holds no tensor {name!r}, though the index says so;"
                f" copy the folder again"
            ) from error

    def _header(self, file: str) -> Any:
        if file not in self._open:
            path = self.folder / file
            check_file(path, error=ModelError)
            try:
                # Checks the header's length, and its offsets against the file's size.
                self._open[file] = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise ModelError(f"{_short(path)} is missing; copy the folder again") from error
            except (SafetensorError, OSError, ValueError, MemoryError) as error:
                raise self._damaged(file, error) from error
        return self._open[file]

    def _damaged(self, file: str, error: Exception) -> ModelError:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return ModelError(f"{_short(self.folder / file)} is damaged ({reason}); copy it again")

    def _read_index(self) -> dict[str, str]:
        path = self.folder / INDEX
        try:
            index = read_json(path, _Index, error=ModelError)
        except ModelError as error:
            raise ModelError(f"{error}; copy it again") from error
        for file in set(index.weight_map.values()):
            # A name of this system, and nothing that climbs out of the folder.
            named = file.isprintable() and len(file) < LONGEST_NAME and Path(file).name == file
            if not named or not file.endswith(".safetensors"):
                raise ModelError(
                    f"{path} names {file[:60]!r}, which is no safetensors file of the folder"
                    " itself; do not trust this folder"
                )
        return index.weight_map


def _short(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 300 else f"{text[:150]}...{text[-150:]}"


def is_finite(values: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether all values are finite, also once converted to `dtype`; copy nothing."""
    if not values.numel():
        return True
    extremes = torch.stack(torch.aminmax(values.detach()))  # a NaN makes both of them NaN
    return bool(extremes.to(dtype or values.dtype).isfinite().all())
