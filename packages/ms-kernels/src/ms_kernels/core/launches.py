"""Launch parameters of kernels: from the chip's tuning table, or the kernel's defaults.

Nothing is measured in a run: launch parameters are a pure function of chip, dtype and sizes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

import msgspec
import torch
from attrs import frozen
from torch import Tensor

from ms_kernels.contracts.call import describe
from ms_kernels.core.chips import chip_of
from ms_kernels.core.tables import entry_for
from ms_kernels.errors import TableError

ANY = "any"
"""Chip name reported for a launch that uses the kernel's defaults."""

ANY_SIZE = 2**63 - 1

Values = Mapping[str, int]
"""A kernel's launch parameters, such as block sizes and warps."""

Defaults = tuple[tuple[int, Values], ...]
"""Pairs (largest size, parameters), in ascending order of size."""


def by_size(parameter: str, values: Mapping[int, int], **others: int) -> Defaults:
    """Return defaults where one parameter depends on the size and the others are fixed."""
    return tuple((limit, {**others, parameter: value}) for limit, value in values.items())


class TableKey(NamedTuple):
    """Chip and dtype: the part of a table's key that depends on the call."""

    chip: str
    dtype: torch.dtype
    """Dtype of the operator's first argument."""


def key_of(tensor: Tensor) -> TableKey:
    """Return the table key of an operator whose first argument is `tensor`."""
    return TableKey(chip_of(tensor.device), tensor.dtype)


@frozen(kw_only=True, eq=False)
class TunedKernel:
    """A kernel, as used by one operator, whose launch parameters come from tuning tables."""

    operator: str
    """Operator that launches it. Two operators may share a kernel with different parameters."""
    name: str
    """Name in tables."""
    backend: str = "triton"
    version: int = 1
    """Version of the implementation."""
    sizes: tuple[str, ...] = ()
    """Symbols of the contract whose sizes table entries may depend on."""
    tried_at: tuple[Mapping[str, int], ...] = ({},)
    """Sizes at which a tuner measures, ascending; the contract's example fills in the rest."""
    candidates: tuple[Values, ...] = ()
    """Parameters that a tuner tries in addition to those in the tables."""
    defaults: Defaults = ()
    """Parameters on a chip without a table, by size of the first symbol; never measured."""
    wide_defaults: Defaults = ()
    """Defaults for float32, if they differ."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Unique key of the kernel."""
        return self.operator, self.backend, self.name

    def values(self, key: TableKey, *sizes: int) -> dict[str, int]:
        """Return the launch parameters for the given sizes of the symbols in `self.sizes`.

        Raises:
            TableError: if no table has the kernel and it has no defaults.
        """
        # Parameters under test take precedence over tables.
        tried = _tried.get()
        if tried is not None and tried[0].key == self.key:
            return dict(tried[1])
        return dict(launch_of(self, key.chip, describe(key.dtype), sizes).values)


_tried: ContextVar[tuple[TunedKernel, Values] | None] = ContextVar("tried", default=None)


@contextmanager
def trying(kernel: TunedKernel, values: Values) -> Iterator[None]:
    """Launch a kernel with `values` inside the `with` block; used by the tuner."""
    token = _tried.set((kernel, values))
    try:
        yield
    finally:
        _tried.reset(token)


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Launch parameters of one kernel in a call, and their source."""

    kernel: str
    values: dict[str, int]
    """Launch parameters, such as block sizes and warps."""
    chip: str
    """Chip of the table they are from; ``"any"`` for the kernel's defaults."""
    measured: bool
    """Whether they were timed on that chip."""

    def __str__(self) -> str:
        values = " ".join(f"{name}={value}" for name, value in self.values.items())
        origin = "measured" if self.measured else "never measured"
        return f"{self.kernel} {values} ({self.chip}, {origin})"


@lru_cache(maxsize=4096)
def launch_of(kernel: TunedKernel, chip: str, dtype: str, sizes: tuple[int, ...]) -> Launch:
    """Return the launch parameters of a kernel: the chip's table entry, else the defaults.

    Raises:
        TableError: if there is neither.
    """
    size_of = dict(zip(kernel.sizes, sizes, strict=True))
    entry = entry_for(chip, kernel.operator, kernel.backend, kernel.version, dtype)
    for config in entry.configurations if entry is not None else ():
        fits = all(size_of.get(name, 0) <= limit for name, limit in config.at_most.items())
        if fits and config.kernel == kernel.name:
            measured = entry is not None and entry.measured
            return Launch(kernel=kernel.name, values=config.values, chip=chip, measured=measured)
    wide = dtype == "float32" and kernel.wide_defaults
    for limit, values in kernel.wide_defaults if wide else kernel.defaults:
        if not sizes or sizes[0] <= limit:
            return Launch(kernel=kernel.name, values=dict(values), chip=ANY, measured=False)
    raise TableError(
        f"no tuning table has {kernel.name} of {kernel.operator} {kernel.backend}, version "
        f"{kernel.version}, in {dtype}, and the kernel has no defaults; add defaults"
    )
