"""Describes one use of an operator without its data, for checks and choices."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes that every reference takes; float64 exists for gradient checks."""

ACCUMULATED = (torch.float32, torch.float64)
"""Dtypes of tables and statistics that must not be rounded to half precision."""

INDICES = (torch.int64, torch.int32)
"""Dtypes of classes, tokens, experts and places."""

Dims = Mapping[str, int]
"""Sizes by symbol; ``"..."`` is the product of the leading dims."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over `dtype` are kept: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# TensorMeta and Call are NamedTuples, not attrs classes, because torch.compile traces their
# construction without a graph break.
class TensorMeta(NamedTuple):
    """A tensor without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]
    plain: bool
    """False for a tensor subclass such as DTensor or FakeTensor, and for sparse layouts."""

    @property
    def contiguous(self) -> bool:
        """Whether its elements stand one after another, the last dim fastest."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


class Call(NamedTuple):
    """One use of an operator, without its data."""

    operator: str
    tensors: tuple[TensorMeta | None, ...]
    """One for each of the contract's arguments, in order; None where it was left out."""
    options: tuple[Any, ...]
    """One for each of the contract's options, in order."""
    compiling: bool = False
    """Whether torch.compile is tracing this call."""
    chip: str = ""
    """Name of the chip it runs on, for tuning tables."""
    transformed: bool = False
    """Whether a torch.func transform or forward-mode differentiation is active."""

    @property
    def given(self) -> list[TensorMeta]:
        """The tensors that were passed."""
        return [each for each in self.tensors if each is not None]

    @property
    def elements(self) -> int:
        """Elements of all arguments together."""
        total = 0
        for each in self.given:
            product = 1
            for size in each.shape:
                product *= size
            total += product
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
    """Write a dtype or a shape as users write it: ``bfloat16``, ``(2, 3)``."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return f"({', '.join([str(size) for size in value])}{',' if len(value) == 1 else ''})"
