"""An operator's contract: arguments, limits, cost, tolerances and reference.

Sizes are named by symbols, as in ``"B S Hq D"``. A symbol has the same size in all arguments;
``...`` matches any number of leading dims. All checks use shapes, dtypes, devices and strides only:
`Contract.bind` is a pure function of a `Call`, so its result can be cached.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from attrs import field, frozen
from torch import Tensor

from ms_kernels.contracts.arguments import (
    Argument,
    Cost,
    Ladder,
    Model,
    Option,
    no_cost,
    symbols_of,
)
from ms_kernels.contracts.call import Call, Dims, TensorMeta, describe
from ms_kernels.contracts.tolerance import ROUNDED_ONCE, OperatorTolerances
from ms_kernels.errors import ArgumentError, shown


class Variant(NamedTuple):
    """An extra call for tests: some options are valid only at other sizes."""

    options: Mapping[str, Any]
    dims: Dims


def _no_rules(dims: Dims, options: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    return ()


@frozen(kw_only=True)
class Contract:
    """Everything that a backend must implement and a caller may rely on."""

    name: str
    """Name of the public function."""
    summary: str
    """One-line description."""
    arguments: tuple[Argument, ...]
    """Tensor arguments, in order."""
    options: tuple[Option, ...] = ()
    """Non-tensor arguments, in order."""
    returns: str
    """Shapes and dtypes of the results, in words."""
    results: Mapping[str, str] = field(factory=dict)
    """Names and dims of the results; an option may omit the last one or change its dims."""
    wide: bool = False
    """Whether results are float32 (float64 for float64) for all argument dtypes."""
    splits: tuple[str, ...] = ()
    """Symbols along which the operator is independent and may be sharded; symbols that must be
    sharded together share one string."""
    positive: tuple[str, ...] = field(converter=symbols_of)
    """Symbols whose size must be at least 1; all others may be 0."""
    rules: Callable[[Dims, Mapping[str, Any]], Iterable[tuple[str, str]]] = _no_rules
    """Constraints across arguments: yields (argument, allowed values) per violation."""
    check_values: Callable[..., None] | None = None
    """Rejects bad values before a backend runs; takes tensors, then options."""
    explain_error: Callable[..., None] | None = None
    """Raises a precise error for bad values after a backend failed; same arguments."""
    forward: Cost
    """Minimum work of the forward pass, from sizes and bytes per element."""
    backward: Cost = no_cost
    """Minimum work of the backward pass; zero without a gradient."""
    tolerance: OperatorTolerances = ROUNDED_ONCE
    """Allowed error of results and gradients."""
    example: Dims
    """Sizes of a typical small call that every backend supports."""
    follows: Mapping[str, str] = field(factory=dict)
    """Symbols that default to the size of another symbol."""
    reference: Callable[..., Any]
    """Slow reference in plain torch."""
    variants: tuple[Variant, ...] = ()
    """Extra calls for tests."""
    ladders: tuple[Ladder, ...] = ()
    """Sizes at which a tuner compares implementations."""
    model: Model | None = None
    """Export to a CPU library. None: not exported."""

    @property
    def defaults(self) -> tuple[Any, ...]:
        """Default of each option, in order."""
        return tuple(option.default for option in self.options)

    def bind(self, call: Call) -> dict[str, int]:
        """Check `call` and return the size of each symbol.

        Raises:
            ArgumentError: naming the first invalid argument, its value and the allowed values.
        """
        sizes: dict[str, Any] = {}
        first = call.tensors[0]
        for argument, meta in zip(self.arguments, call.tensors, strict=True):
            if meta is None:
                if not argument.optional:
                    raise self._refusal(argument, "None", "a tensor")
                continue
            self._check_dtype(argument, meta, call)
            if first is not None and meta.device != first.device:
                fits = f"on {first.device}, as {self.arguments[0].name} is"
                raise self._refusal(argument, f"on {meta.device}", fits)
            self._bind_shape(argument, meta, sizes)
        options = {}
        for option, value in zip(self.options, call.options, strict=True):
            if not option.holds(value):
                raise ArgumentError(self.name, option.name, shown(value), option.fits)
            options[option.name] = value
        # `...` is bound to a tuple of sizes; rules and costs see their product.
        dims = {name: _count(size) for name, size in sizes.items()}
        for argument_name, fits in self.rules(dims, options):
            raise ArgumentError(
                self.name, argument_name, self._got(argument_name, call, options), fits
            )
        return dims

    def _refusal(self, argument: Argument, got: str, fits: str) -> ArgumentError:
        return ArgumentError(self.name, argument.name, got, fits)

    def _check_dtype(self, argument: Argument, meta: TensorMeta, call: Call) -> None:
        if meta.dtype not in argument.dtypes:
            fits = " or ".join(describe(dtype) for dtype in argument.dtypes)
            raise self._refusal(argument, describe(meta.dtype), fits)
        if argument.like is None:
            return
        position = [other.name for other in self.arguments].index(argument.like)
        model = call.tensors[position]
        if model is not None and meta.dtype != model.dtype:
            fits = f"{describe(model.dtype)}, as {argument.like} is"
            raise self._refusal(argument, describe(meta.dtype), fits)

    def _bind_shape(self, argument: Argument, meta: TensorMeta, sizes: dict[str, Any]) -> None:
        """Bind the symbols of `argument` in `sizes`, or check them against earlier arguments."""
        # Error messages show the sizes bound by earlier arguments.
        names, shape, bound = argument.dims, meta.shape, dict(sizes)
        if names[0] == "..." and len(shape) >= len(names) - 1:
            # `...` takes the dims before the named ones.
            names = names[1:]
            leading = shape[: len(shape) - len(names)]
            shape = shape[len(leading) :]
            if sizes.setdefault("...", leading) != leading:
                raise self._shape_error(argument, meta, bound)
        if len(shape) != len(names):
            raise self._shape_error(argument, meta, bound)
        for name, size in zip(names, shape, strict=True):
            if sizes.setdefault(name, size) != size:
                raise self._shape_error(argument, meta, bound)
            if size == 0 and name in self.positive:
                raise self._shape_error(argument, meta, {}, f" with {name} at least 1")

    def _shape_error(
        self, argument: Argument, meta: TensorMeta, sizes: Mapping[str, Any], limit: str = ""
    ) -> ArgumentError:
        fits = f"of shape {_form(argument.dims, sizes)}{limit}"
        return self._refusal(argument, f"of shape {describe(meta.shape)}", fits)

    def _got(self, argument_name: str, call: Call, options: Mapping[str, Any]) -> str:
        if argument_name in options:
            return shown(options[argument_name])
        for argument, meta in zip(self.arguments, call.tensors, strict=True):
            if argument.name == argument_name and meta is not None:
                return f"of shape {describe(meta.shape)}"
        return "None"

    def _sizes(self, dims: Dims) -> dict[str, int]:
        """Complete the sizes of a call from `follows` and the example."""
        following = {name: dims[other] for name, other in self.follows.items() if other in dims}
        return {**self.example, **following, **dims}

    def call(
        self,
        dims: Dims,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        options: Mapping[str, Any] | None = None,
        without: Iterable[str] = (),
        chip: str = "",
    ) -> Call:
        """Describe a call on contiguous tensors; the device need not exist.

        Args:
            dims: sizes by symbol; missing ones are taken from `example`.
            dtype: dtype of the arguments that allow it.
            device: device of the tensors.
            options: options that differ from their defaults.
            without: names of optional arguments to omit.
            chip: name of the chip, for tuning tables.
        """
        sizes = self._sizes(dims)
        tensors: list[TensorMeta | None] = []
        for argument in self.arguments:
            shape = tuple(sizes[name] for name in argument.dims)
            # A meta tensor has the contiguous strides, and no memory.
            strides = torch.empty(shape, device="meta").stride()
            allowed = argument is self.arguments[0] or dtype in argument.dtypes
            argument_dtype = dtype if allowed else argument.dtypes[0]
            meta = TensorMeta(shape, argument_dtype, torch.device(device), strides, True)
            tensors.append(None if argument.name in without else meta)
        values = tuple((options or {}).get(option.name, option.default) for option in self.options)
        return Call(self.name, tuple(tensors), values, chip=chip)

    def draw(
        self,
        dims: Dims,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> dict[str, Tensor]:
        """Generate example arguments, the same on every machine.

        Args:
            dims: sizes by symbol; missing ones are taken from `example`.
            dtype: dtype of the arguments that allow it.
            device: device of the arguments; values are generated on the CPU.
            seed: random seed.
        """
        # float64 on the CPU, so that the values do not depend on device and dtype.
        generator = torch.Generator().manual_seed(seed)
        sizes = self._sizes(dims)
        tensors = {}
        for argument in self.arguments:
            shape = tuple(sizes[name] for name in argument.dims)
            if argument.draw is None:
                tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
            else:
                tensor = argument.draw(shape, sizes, generator)
            if tensor.is_floating_point():
                tensor = tensor.to(dtype if dtype in argument.dtypes else argument.dtypes[0])
            tensors[argument.name] = tensor.to(device)
        return tensors


def _count(size: int | tuple[int, ...]) -> int:
    if not isinstance(size, tuple):
        return size
    product = 1
    for part in size:
        product *= part
    return product


def _form(names: Sequence[str], sizes: Mapping[str, Any]) -> str:
    """Format the expected shape, with bound sizes as numbers and others as symbols."""
    words: list[str] = []
    for name in names:
        if name == "..." and name in sizes:
            words += [str(size) for size in sizes[name]]
        else:
            words.append(str(sizes.get(name, name)))
    return describe(words)
