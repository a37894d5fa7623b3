"""Partial reads of tensors from a folder of safetensors files.

A folder has either `model.safetensors`, or several files and `model.safetensors.index.json`.
"""

import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ms_parallel.entry import one_line
from ms_parallel.errors import ModelError
from ms_parallel.files.untrusted import check_file, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_NAME = 256
"""Limit of common file systems."""
_DTYPES = ("F64", "F32", "F16", "BF16")


class _Index(msgspec.Struct, frozen=True):
    """Content of `model.safetensors.index.json`."""

    weight_map: dict[str, str]


class WeightFolder:
    """Weights of a folder, whose files are opened on demand.

    Raises:
        ModelError: the folder has no weights, or the index is damaged or names a file outside it.
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
                f"{folder} has neither {SINGLE} nor {INDEX}; use the folder of a saved model"
            )

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Read the shape of a tensor from its file's header.

        Raises:
            ModelError: no file has the tensor, the file is damaged, or the dtype is not a float.
        """
        tensor_slice = self._slice(name)
        if tensor_slice.get_dtype() not in _DTYPES:
            raise ModelError(
                f"{self.folder / self._files[name]} has {name!r} as {tensor_slice.get_dtype()},"
                f" which is not supported; supported: {', '.join(_DTYPES)}"
            )
        return tuple(tensor_slice.get_shape())

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Read only the part of a tensor inside a box.

        Raises:
            ModelError: no file has the tensor, or the file is damaged.
        """
        # safetensors cannot read with a step, so it is applied after the read.
        steps = tuple(slice(None, None, dim.step) for dim in box)
        dense = tuple(slice(dim.start, dim.stop) for dim in box)
        try:
            return self._slice(name)[dense][steps]  # type: ignore[no-any-return]
        except SafetensorError as error:
            raise self._damaged(self._files[name], error) from error

    def _slice(self, name: str) -> Any:
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"{self.folder} has no tensor {name!r}; is the model complete?")
        try:
            return self._header(file).get_slice(name)
        except SafetensorError as error:
            raise ModelError(
                f"{self.folder / file} has no tensor {name!r}, although the index says so; copy the"
                f" folder again"
            ) from error

    def _header(self, file: str) -> Any:
        if file not in self._open:
            path = self.folder / file
            check_file(path, error=ModelError)
            try:
                # Validates the header's length, and its offsets against the file size.
                self._open[file] = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise ModelError(f"{_short(path)} is missing; copy the folder again") from error
            except (SafetensorError, OSError, ValueError, MemoryError) as error:
                raise self._damaged(file, error) from error
        return self._open[file]

    def _damaged(self, file: str, error: Exception) -> ModelError:
        reason = one_line(str(error))[:200] or type(error).__name__
        return ModelError(f"{_short(self.folder / file)} is damaged ({reason}); copy it again")

    def _read_index(self) -> dict[str, str]:
        path = self.folder / INDEX
        try:
            index = read_json(path, _Index, error=ModelError)
        except ModelError as error:
            raise ModelError(f"{error}; copy it again") from error
        for file in set(index.weight_map.values()):
            # A plain file name that cannot escape the folder.
            is_plain_name = file.isprintable() and len(file) < MAX_NAME and Path(file).name == file
            if not is_plain_name or not file.endswith(".safetensors"):
                raise ModelError(
                    f"{path} names {file[:60]!r}, which is not a safetensors file in the folder"
                    " itself; do not trust this folder"
                )
        return index.weight_map


def _short(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 300 else f"{text[:150]}...{text[-150:]}"


def is_finite(values: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether all values are finite, also after conversion to `dtype`; copies nothing."""
    if not values.numel():
        return True
    extremes = torch.stack(torch.aminmax(values.detach()))  # NaN propagates to both
    return bool(extremes.to(dtype or values.dtype).isfinite().all())
