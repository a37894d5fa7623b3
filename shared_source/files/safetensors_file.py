"""A safetensors file, written one tensor at a time: the sizes are known before any value is.

The library's own writer wants all tensors of a file in memory at once.
"""

import os
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Self

import msgspec
import torch
from attrs import frozen
from torch import Tensor

from .durable import write_all

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""safetensors' name of each dtype that may be saved."""


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


class WeightFile:
    """A safetensors file that takes its tensors one by one, in a given order.

    Args:
        path: where to write; there must be no file.
        entries: what will be written, in order; the wider dtypes first, if each is to be aligned.
    """

    def __init__(self, path: Path, entries: Iterable[TensorEntry]) -> None:
        self.path = path
        self._awaited = list(entries)[::-1]
        self._file: FileIO | None = None
        self._header = header_of(reversed(self._awaited))

    def __enter__(self) -> Self:
        self._file = self.path.open("xb", buffering=0)
        write_all(self._file, self._header)
        return self

    def write(self, name: str, values: Tensor) -> None:
        """Append a tensor's values; they are converted to the dtype of its entry."""
        entry = self._awaited.pop()
        assert self._file is not None
        assert (entry.name, entry.shape) == (name, tuple(values.shape))
        plain = values.detach().to("cpu", entry.dtype).contiguous()
        write_all(self._file, plain.reshape(-1).view(torch.uint8).numpy().data)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        assert self._file is not None
        with self._file as file:
            if kind is None:
                assert not self._awaited
                os.fsync(file.fileno())


def header_of(entries: Iterable[TensorEntry]) -> bytes:
    """Write a safetensors header, its length and JSON, padded so that values begin at 8·n bytes."""
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
