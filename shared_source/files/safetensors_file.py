"""Streaming safetensors writer: one tensor at a time, from shapes known in advance.

The writer of the `safetensors` package needs all tensors of a file in memory at once.
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
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Supported dtypes and their safetensors names."""


@frozen(kw_only=True)
class TensorEntry:
    """Name, shape and dtype of a tensor in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Size of the values in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class WeightFile:
    """Context manager that writes a safetensors file tensor by tensor, in a fixed order.

    Args:
        path: output path, which must not exist.
        entries: tensors in the order of writing. To keep them all aligned, put wider dtypes first.
    """

    def __init__(self, path: Path, entries: Iterable[TensorEntry]) -> None:
        self.path = path
        self._pending = list(entries)[::-1]
        self._file: FileIO | None = None
        self._header = header_of(reversed(self._pending))

    def __enter__(self) -> Self:
        self._file = self.path.open("xb", buffering=0)
        write_all(self._file, self._header)
        return self

    def write(self, name: str, values: Tensor) -> None:
        """Append a tensor, converted to the dtype of its entry."""
        entry = self._pending.pop()
        assert self._file is not None
        assert (entry.name, entry.shape) == (name, tuple(values.shape))
        converted = values.detach().to("cpu", entry.dtype).contiguous()
        write_all(self._file, converted.reshape(-1).view(torch.uint8).numpy().data)

    def __exit__(self, error_type: object, error: object, trace: object) -> None:
        assert self._file is not None
        with self._file as file:
            if error_type is None:
                assert not self._pending
                os.fsync(file.fileno())


def header_of(entries: Iterable[TensorEntry]) -> bytes:
    """Return the safetensors header: length and JSON, padded to a multiple of 8 bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.size_bytes
        header[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (start, end),
        }
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
