"""The contract of an operator as a value: arguments, limits, cost, tolerance and reference.

Sizes are named by symbols, written as in ``"B S Hq D"``. A symbol that stands in two arguments
must have one size; ``...`` stands for any number of leading dims. Everything that is checked is
checked here, from shapes, dtypes, devices and strides alone: `Contract.bind` is a pure function
of a `Call`, so that its answer may be kept and asked for again at no cost.
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
from ms_kernels.contracts.tolerance import ROUNDED_ONCE, Tolerances
from ms_kernels.errors import ArgumentError, shown


class Variant(NamedTuple):
    """A further call that proofs try: some options are only right at other sizes."""

    options: Mapping[str, Any]
    dims: Dims


def _no_rules(dims: Dims, options: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    return ()


@frozen(kw_only=True)
class Contract:
    """One operator: everything a backend must agree with and a caller may rely on."""

    name: str
    """Name of the public function."""
    summary: str
    """What it computes, in one line."""
    arguments: tuple[Argument, ...]
    """Tensor arguments, in order."""
    options: tuple[Option, ...] = ()
    """Other arguments, in order."""
    returns: str
    """Shapes and dtypes of the results, in words."""
    results: Mapping[str, str] = field(factory=dict)
    """Names and dims of the results; an option may leave the last one out, or its dims."""
    wide: bool = False
    """Whether results are float32 (float64 for float64), whatever the arguments are."""
    splits: tuple[str, ...] = ()
    """Symbols along which the operator falls into pieces that know nothing of each other, so that
    each process may hold a piece; those that must be cut together stand in one string."""
    positive: tuple[str, ...] = field(converter=symbols_of)
    """Symbols whose size may not be 0; the others are rows, of which there may be none."""
    rules: Callable[[Dims, Mapping[str, Any]], Iterable[tuple[str, str]]] = _no_rules
    """Limits across arguments: yields (argument, what would fit) for each that is broken."""
    check_values: Callable[..., None] | None = None
    """Refuses numbers that no backend refuses, before it runs; takes tensors, then options."""
    explain_error: Callable[..., None] | None = None
    """Raises what is wrong with the numbers, if anything, once a backend failed; takes the same."""
    forward: Cost
    """Least work of the forward pass, from sizes and bytes per element."""
    backward: Cost = no_cost
    """Least work of the backward pass; none where there is no gradient."""
    tolerance: Tolerances = ROUNDED_ONCE
    """How far results and gradients may lie from the truth."""
    example: Dims
    """Sizes of an ordinary small call, for which no backend is too large."""
    follows: Mapping[str, str] = field(factory=dict)
    """Symbols that have the size of another one where only that one is given."""
    reference: Callable[..., Any]
    """The slow truth, in plain torch."""
    variants: tuple[Variant, ...] = ()
    """Calls that proofs try beside the example and the options' trials."""
    ladders: tuple[Ladder, ...] = ()
    """Sizes at which a tuner compares implementations."""
    model: Model | None = None
    """What a library for the CPU holds; None for nothing."""

    changing: tuple[tuple[int, Option], ...] = field(init=False, repr=False)
    """Options that no decision depends on, with their places."""

    @changing.default
    def _changing(self) -> tuple[tuple[int, Option], ...]:
        return tuple(pair for pair in enumerate(self.options) if pair[1].changing)

    @property
    def mutates(self) -> bool:
        """Whether it works in place: it returns None and has no gradient."""
        return any(argument.mutated for argument in self.arguments)

    @property
    def defaults(self) -> tuple[Any, ...]:
        """Each option's default, in order."""
        return tuple(option.default for option in self.options)

    def check_option(self, option: Option, value: object) -> None:
        """Refuse a value that an option may not have.

        Raises:
            ArgumentError: naming the option, its value and what fits.
        """
        if not option.holds(value):
            raise ArgumentError(self.name, option.name, shown(value), option.fits)

    def bind(self, call: Call) -> dict[str, int]:
        """Check `call` and return the size of each symbol.

        Raises:
            ArgumentError: naming the first argument that does not fit, what it is and what fits.
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
            if argument.mutated and _lies_on_itself(meta):
                got = f"of strides {describe(meta.strides)}, several elements in one place"
                raise self._refusal(argument, got, "written element by element")
        options = {}
        for option, value in zip(self.options, call.options, strict=True):
            self.check_option(option, value)
            options[option.name] = value
        dims = {name: _count(size) for name, size in sizes.items()}
        for culprit, fits in self.rules(dims, options):
            raise ArgumentError(self.name, culprit, self._got(culprit, call, options), fits)
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
        """Give each symbol of `argument` its size, or check it against the one it has."""
        names, shape, known = argument.dims, meta.shape, dict(sizes)
        if names[0] == "..." and len(shape) >= len(names) - 1:
            names = names[1:]
            leading = shape[: len(shape) - len(names)]
            shape = shape[len(leading) :]
            if sizes.setdefault("...", leading) != leading:
                raise self._misshapen(argument, meta, known)
        if len(shape) != len(names):
            raise self._misshapen(argument, meta, known)
        for name, size in zip(names, shape, strict=True):
            if sizes.setdefault(name, size) != size:
                raise self._misshapen(argument, meta, known)
            if size == 0 and name in self.positive:
                raise self._misshapen(argument, meta, {}, f" with {name} at least 1")

    def _misshapen(
        self, argument: Argument, meta: TensorMeta, sizes: Mapping[str, Any], limit: str = ""
    ) -> ArgumentError:
        fits = f"of shape {_form(argument.dims, sizes)}{limit}"
        return self._refusal(argument, f"of shape {describe(meta.shape)}", fits)

    def _got(self, culprit: str, call: Call, options: Mapping[str, Any]) -> str:
        if culprit in options:
            return shown(options[culprit])
        for argument, meta in zip(self.arguments, call.tensors, strict=True):
            if argument.name == culprit and meta is not None:
                return f"of shape {describe(meta.shape)}"
        return "None"

    def _sizes(self, dims: Dims) -> dict[str, int]:
        """Return all sizes of a call: those given, what follows from them, the example's."""
        followed = {name: dims[other] for name, other in self.follows.items() if other in dims}
        return {**self.example, **followed, **dims}

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
        """Describe a call on contiguous tensors, on a device that need not be here.

        Args:
            dims: sizes by symbol; those left out are taken from `example`.
            dtype: dtype of the arguments that may have it.
            device: where the tensors would be.
            options: those that are not at their defaults.
            without: names of optional arguments to leave out.
            chip: name of the chip, for tuning tables.
        """
        sizes = self._sizes(dims)
        tensors: list[TensorMeta | None] = []
        for argument in self.arguments:
            shape = tuple(sizes[name] for name in argument.dims)
            strides = torch.empty(shape, device="meta").stride()
            free = argument is self.arguments[0] or dtype in argument.dtypes
            fitting = dtype if free else argument.dtypes[0]
            meta = TensorMeta(shape, fitting, torch.device(device), strides, True)
            tensors.append(None if argument.name in without else meta)
        values = tuple((options or {}).get(each.name, each.default) for each in self.options)
        return Call(self.name, tuple(tensors), values, chip=chip)

    def draw(
        self,
        dims: Dims,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> dict[str, Tensor]:
        """Make example arguments of the given sizes, the same on every machine.

        Args:
            dims: sizes by symbol; those left out are taken from `example`.
            dtype: dtype of the arguments that may have it.
            device: where the arguments go after they were drawn on the CPU.
            seed: seed of the numbers.
        """
        generator = torch.Generator().manual_seed(seed)
        sizes = self._sizes(dims)
        drawn = {}
        for argument in self.arguments:
            shape = tuple(sizes[name] for name in argument.dims)
            if argument.draw is None:
                tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
            else:
                tensor = argument.draw(shape, sizes, generator)
            if tensor.is_floating_point():
                tensor = tensor.to(dtype if dtype in argument.dtypes else argument.dtypes[0])
            drawn[argument.name] = tensor.to(device)
        return drawn


def _lies_on_itself(meta: TensorMeta) -> bool:
    """Return whether two elements may share memory, as those of an expanded tensor do."""
    reach = 0
    pairs = zip(meta.strides, meta.shape, strict=True)
    for stride, size in sorted((pair for pair in pairs if pair[1] != 1), key=lambda pair: pair[0]):
        if stride <= reach and 0 not in meta.shape:
            return True
        reach += (size - 1) * stride
    return False


def _count(size: int | tuple[int, ...]) -> int:
    if not isinstance(size, tuple):
        return size
    product = 1
    for part in size:
        product *= part
    return product


def _form(names: Sequence[str], sizes: Mapping[str, Any]) -> str:
    """Write what a shape must look like, known sizes as numbers and others as symbols."""
    words: list[str] = []
    for name in names:
        if name == "..." and name in sizes:
            words += [str(size) for size in sizes[name]]
        else:
            words.append(str(sizes.get(name, name)))
    return describe(words)
