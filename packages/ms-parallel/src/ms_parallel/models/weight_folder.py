"""The weights of a folder of safetensors files, read by parts.

A folder holds either `model.safetensors`, or several files and `model.safetensors.index.json`.
"""

from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ms_parallel.errors import ModelError

__all__ = ["INDEX", "SINGLE", "WeightFolder"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
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
        if (folder / SINGLE).is_file():
            self._files = dict.fromkeys(self._header(SINGLE).keys(), SINGLE)
        elif (folder / INDEX).is_file():
            self._files = self._read_index()
        else:
            raise ModelError(
                f"{folder} holds neither {SINGLE} nor {INDEX}; give a folder of a saved model"
            )

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from its file's header.

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
        """The part of a tensor inside a box; only that part is read.

        Raises:
            ModelError: no file holds it, or that file is damaged.
        """
        try:
            return self._slice(name)[box]  # type: ignore[no-any-return]
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
            try:
                # Checks the header's length, and its offsets against the file's size.
                self._open[file] = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise ModelError(f"{path} is missing; copy the folder again") from error
            except (SafetensorError, OSError) as error:
                raise self._damaged(file, error) from error
        return self._open[file]

    def _damaged(self, file: str, error: Exception) -> ModelError:
        return ModelError(f"{self.folder / file} is damaged ({error}); copy it again")

    def _read_index(self) -> dict[str, str]:
        path = self.folder / INDEX
        try:
            index = msgspec.json.decode(path.read_bytes(), type=_Index)
        except msgspec.DecodeError as error:
            raise ModelError(f"{path} is damaged ({error}); copy it again") from error
        for file in index.weight_map.values():
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ModelError(
                    f"{path} names {file!r}, which is no safetensors file of the folder itself;"
                    f" do not trust this folder"
                )
        return index.weight_map
