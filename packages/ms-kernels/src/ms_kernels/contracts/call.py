"""Metadata of one operator call, without data: input of checks and backend selection."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes that every reference supports; float64 is for gradient checks."""

ACCUMULATED = (torch.float32, torch.float64)
"""Dtypes of tables and statistics that must not be rounded to half precision."""

INDICES = (torch.int64, torch.int32)
"""Dtypes of class, token, expert and position indices."""

Dims = Mapping[str, int]
"""Sizes by symbol; ``"..."`` is the product of the leading dims."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# TensorMeta and Call are NamedTuples, not attrs classes, because torch.compile traces their
# construction without a graph break.
class TensorMeta(NamedTuple):
    """Metadata of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]
    plain: bool
    """False for a tensor subclass such as DTensor or FakeTensor, and for sparse layouts."""

    @property
    def contiguous(self) -> bool:
        """Whether the tensor is contiguous in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


class Call(NamedTuple):
    """One operator call, without data."""

    operator: str
    tensors: tuple[TensorMeta | None, ...]
    """One per argument of the contract, in order; None if omitted."""
    options: tuple[Any, ...]
    """One per option of the contract, in order."""
    compiling: bool = False
    """Whether torch.compile is tracing this call."""
    chip: str = ""
    """Chip it runs on, for tuning tables."""
    transformed: bool = False
    """Whether a torch.func transform or forward-mode differentiation is active."""

    @property
    def present(self) -> list[TensorMeta]:
        """The tensors that are not None."""
        return [tensor for tensor in self.tensors if tensor is not None]

    @property
    def elements(self) -> int:
        """Total number of elements of all arguments."""
        total = 0
        for tensor in self.present:
            numel = 1
            for size in tensor.shape:
                numel *= size
            total += numel
        return total

    @property
    def device(self) -> torch.device:
        """Device of the first argument."""
        assert self.tensors[0] is not None
        return self.tensors[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first argument."""
        assert self.tensors[0] is not None
        return self.tensors[0].dtype


def describe(value: torch.dtype | Sequence[int | str]) -> str:
    """Format a dtype or a shape as users write it: ``bfloat16``, ``(2, 3)``."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return f"({', '.join([str(size) for size in value])}{',' if len(value) == 1 else ''})"
