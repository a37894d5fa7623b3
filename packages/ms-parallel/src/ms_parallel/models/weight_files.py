"""Weights in safetensors files: read by parts, written one tensor at a time.

A folder holds either `model.safetensors`, or several files and `model.safetensors.index.json`.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec
import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ms_parallel.errors import ModelError

__all__ = ["INDEX", "SINGLE", "TensorEntry", "WeightFile", "WeightFolder"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


@frozen(kw_only=True)
class TensorEntry:
    """A tensor of a file, before its values are known."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


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
            ModelError: no file holds it, or that file is damaged.
        """
        return tuple(self._slice(name).get_shape())

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


class WeightFile:
    """A safetensors file in the making; takes its tensors one by one, in the order promised.

    Args:
        path: Where to write; there must be no file.
        entries: What will be written, in order.
    """

    def __init__(self, path: Path, entries: Iterable[TensorEntry]) -> None:
        self.path = path
        self._awaited = list(entries)[::-1]
        self._file: BinaryIO | None = None
        self._header = _header(reversed(self._awaited))

    def __enter__(self) -> Self:
        self._file = self.path.open("xb")
        self._file.write(self._header)
        return self

    def write(self, name: str, values: Tensor) -> None:
        """Append a tensor's values; they are converted to the dtype promised."""
        entry = self._awaited.pop()
        assert self._file is not None
        assert (entry.name, entry.shape) == (name, tuple(values.shape))
        plain = values.detach().to("cpu", entry.dtype).contiguous()
        self._file.write(plain.reshape(-1).view(torch.uint8).numpy().data)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None
        with self._file as file:
            if kind is None:
                assert not self._awaited
                file.flush()
                os.fsync(file.fileno())


def _header(entries: Iterable[TensorEntry]) -> bytes:
    """Length and JSON of a safetensors header, padded so that values begin at a multiple of 8."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.size_bytes
        described[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (start, end),
        }
    text = msgspec.json.encode(described)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
