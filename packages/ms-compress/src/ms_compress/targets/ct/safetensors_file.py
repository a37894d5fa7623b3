"""A safetensors file, written tensor by tensor: the sizes are known before any value is."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from attrs import frozen
from torch import Tensor

from ms_compress.files.durable import write_all

__all__ = ["Slot", "TensorFile"]

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
}
ALIGNMENT = 8


@frozen(kw_only=True)
class Slot:
    """Shape and dtype of a tensor that will be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorFile:
    """A file being written, the tensors of `slots` in their order.

    Args:
        path: must not exist.
        slots: name to place; the wider dtypes first, so that each begins aligned.
    """

    def __init__(self, path: Path, slots: Mapping[str, Slot]) -> None:
        self.slots = dict(slots)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name, slot in self.slots.items():
            end = start + slot.size_bytes
            header[name] = {
                "dtype": NAMES[slot.dtype],
                "shape": list(slot.shape),
                "data_offsets": [start, end],
            }
            start = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self.file = path.open("xb", buffering=0)
        write_all(self.file, len(text).to_bytes(8, "little") + text)
        self.waiting = list(self.slots)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, which must be `name`."""
        slot = self.slots[name]
        assert self.waiting.pop(0) == name
        assert (tuple(tensor.shape), tensor.dtype) == (slot.shape, slot.dtype), name
        raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        write_all(self.file, memoryview(raw.data))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            assert not self.waiting
            os.fsync(self.file.fileno())
        self.file.close()
