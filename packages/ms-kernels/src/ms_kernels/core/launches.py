"""The parameters that kernels run with: what the tuning tables say, or the kernel's own defaults.

Nothing is measured in a run: what a kernel runs with is a pure function of chip, dtype and sizes.
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
"""Stands for the chip of a launch whose parameters are the kernel's own defaults."""

ANY_SIZE = 2**63 - 1

Values = Mapping[str, int]
"""A kernel's parameters, such as block sizes and warps."""

Defaults = tuple[tuple[int, Values], ...]
"""Parameters up to a size, the least size first."""


def by_size(parameter: str, values: Mapping[int, int], **others: int) -> Defaults:
    """Return defaults of which one parameter grows with the size; the others stay."""
    return tuple((most, {**others, parameter: value}) for most, value in values.items())


class TableKey(NamedTuple):
    """Where a kernel runs, as tables are keyed."""

    chip: str
    dtype: torch.dtype
    """Dtype of the operator's first argument."""


def key_of(tensor: Tensor) -> TableKey:
    """Return where the operator runs whose first argument is `tensor`."""
    return TableKey(chip_of(tensor.device), tensor.dtype)


@frozen(kw_only=True, eq=False)
class TunedKernel:
    """A kernel, as one operator runs it, whose launch parameters stand in tuning tables."""

    operator: str
    """The operator that it runs for; two may share a kernel and give it other parameters."""
    name: str
    """Its name in tables."""
    backend: str = "triton"
    version: int = 1
    """Version of the implementation."""
    sizes: tuple[str, ...] = ()
    """Symbols of the contract whose sizes tables may tell apart."""
    tried_at: tuple[Mapping[str, int], ...] = ({},)
    """Sizes, where they differ from the contract's example, at which a tuner measures, the least
    first."""
    candidates: tuple[Values, ...] = ()
    """What a tuner tries beside what stands in the tables."""
    defaults: Defaults = ()
    """Parameters on a chip without a table, up to sizes of the first symbol; never measured."""
    wide_defaults: Defaults = ()
    """The same in float32, where it differs."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from every other kernel."""
        return self.operator, self.backend, self.name

    def values(self, key: TableKey, *sizes: int) -> dict[str, int]:
        """Return the parameters to run with; `sizes` are those of the symbols, in order.

        Raises:
            TableError: when no table knows the kernel and it has no defaults.
        """
        tried = _tried.get()
        if tried is not None and tried[0].key == self.key:
            return dict(tried[1])
        return dict(launch_of(self, key.chip, describe(key.dtype), sizes).values)


_tried: ContextVar[tuple[TunedKernel, Values] | None] = ContextVar("tried", default=None)


@contextmanager
def trying(kernel: TunedKernel, values: Values) -> Iterator[None]:
    """Make a kernel run with `values` within: how a tuner tries one after the other."""
    token = _tried.set((kernel, values))
    try:
        yield
    finally:
        _tried.reset(token)


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters that one kernel of a call runs with, and where they stand."""

    kernel: str
    values: dict[str, int]
    """Launch parameters, such as block sizes and warps."""
    chip: str
    """The chip whose table gives them; ``"any"`` for the kernel's own defaults."""
    measured: bool
    """Whether they were timed on that chip."""

    def __str__(self) -> str:
        values = " ".join(f"{name}={value}" for name, value in self.values.items())
        known = "measured" if self.measured else "never measured"
        return f"{self.kernel} {values} ({self.chip}, {known})"


@lru_cache(maxsize=4096)
def launch_of(kernel: TunedKernel, chip: str, dtype: str, sizes: tuple[int, ...]) -> Launch:
    """Return what a kernel runs with: what the chip's table says, else its own defaults.

    Raises:
        TableError: when there is neither.
    """
    known = dict(zip(kernel.sizes, sizes, strict=True))
    entry = entry_for(chip, kernel.operator, kernel.backend, kernel.version, dtype)
    for each in entry.configurations if entry is not None else ():
        fits = all(known.get(name, 0) <= most for name, most in each.at_most.items())
        if fits and each.kernel == kernel.name:
            measured = entry is not None and entry.measured
            return Launch(kernel=kernel.name, values=each.values, chip=chip, measured=measured)
    wide = dtype == "float32" and kernel.wide_defaults
    for most, values in kernel.wide_defaults if wide else kernel.defaults:
        if not sizes or sizes[0] <= most:
            return Launch(kernel=kernel.name, values=dict(values), chip=ANY, measured=False)
    raise TableError(
        f"no table knows {kernel.name} of {kernel.operator} {kernel.backend}, version "
        f"{kernel.version}, in {dtype}; give the kernel defaults"
    )
