"""What an operator is, as a value: its arguments, limits, cost, tolerance and slow truth.

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

from ms_kernels.errors import ArgumentError, shown

__all__ = [
    "ACCUMULATED",
    "FLOATING",
    "Argument",
    "Call",
    "Contract",
    "Dims",
    "Fact",
    "Option",
    "Tolerance",
    "Variant",
    "Work",
    "accumulator",
    "describe",
]

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes that every reference takes; float64 exists for gradient checks."""

ACCUMULATED = (torch.float32, torch.float64)
"""Dtypes of tables and statistics that must not be rounded to half precision."""

Dims = Mapping[str, int]
"""Sizes by symbol; ``"..."`` is the product of the leading dims."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over `dtype` are kept: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Fact and Call are NamedTuples, not attrs classes, because torch.compile traces their
# construction without a graph break.
class Fact(NamedTuple):
    """All that checking and selection may know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]
    plain: bool
    """False for a tensor subclass such as DTensor or FakeTensor, and for sparse layouts."""


class Call(NamedTuple):
    """One use of an operator, without its data."""

    operator: str
    facts: tuple[Fact | None, ...]
    """One for each of the contract's arguments, in order; None where it was left out."""
    options: tuple[Any, ...]
    """One for each of the contract's options, in order."""
    compiling: bool = False
    """Whether torch.compile is tracing this call."""
    chip: str = ""
    """Name of the chip it runs on, for tuning tables."""

    @property
    def elements(self) -> int:
        """Elements of all arguments together."""
        total = 0
        for fact in self.facts:
            if fact is not None:
                product = 1
                for size in fact.shape:
                    product *= size
                total += product
        return total

    @property
    def device(self) -> torch.device:
        """Device of the first argument."""
        assert self.facts[0] is not None
        return self.facts[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first argument."""
        assert self.facts[0] is not None
        return self.facts[0].dtype


class Work(NamedTuple):
    """What an operator must do at the least: its roofline."""

    size_bytes: int
    """Bytes that must cross the memory bus: each input once, each output once."""
    flops: int
    """Floating point operations, a fused multiply-add counted as two."""

    @property
    def intensity(self) -> float:
        """FLOPs for each byte."""
        return self.flops / max(self.size_bytes, 1)


class Tolerance(NamedTuple):
    """``|got - truth| <= relative * |truth| + absolute``, the truth computed in float64."""

    relative: float
    absolute: float


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


class Variant(NamedTuple):
    """A further call that proofs try: some options are only right at other sizes."""

    options: Mapping[str, Any]
    dims: Dims


def _no_rules(dims: Dims, options: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    return ()


def _no_work(dims: Dims, itemsize: int) -> Work:
    return Work(0, 0)


@frozen(kw_only=True)
class Argument:
    """A tensor argument of an operator."""

    name: str
    """Its name in the public function."""
    dims: tuple[str, ...] = field(converter=_split)
    """Symbols of its sizes, given as one string."""
    dtypes: tuple[torch.dtype, ...] = FLOATING
    """Dtypes that fit."""
    like: str | None = None
    """The argument whose dtype it must share."""
    optional: bool = False
    """Whether None may be passed."""
    differentiable: bool = True
    """Whether the operator has a gradient with respect to it."""
    mutated: bool = False
    """Whether the operator writes its result into it; then it returns None."""
    draw: Callable[[tuple[int, ...], Dims, torch.Generator], Tensor] | None = None
    """Makes an example on the CPU from its shape; normal numbers where it is None."""


@frozen(kw_only=True)
class Option:
    """A plain Python argument of an operator."""

    name: str
    """Its name in the public function."""
    default: object
    """What it is when not given."""
    holds: Callable[[Any], bool]
    """Whether a value is allowed."""
    fits: str
    """The values that are allowed, in words."""
    trials: tuple[object, ...] = ()
    """Other values that proofs should try."""
    changing: bool = False
    """Whether it differs from call to call, as a step does: no decision may depend on it."""


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
    splits: tuple[str, ...] = ()
    """Symbols along which the operator falls into pieces that know nothing of each other, so that
    each process may hold a piece; those that must be cut together stand in one string."""
    positive: tuple[str, ...] = field(converter=_split)
    """Symbols whose size may not be 0; the others are rows, of which there may be none."""
    rules: Callable[[Dims, Mapping[str, Any]], Iterable[tuple[str, str]]] = _no_rules
    """Limits across arguments: yields (argument, what would fit) for each that is broken."""
    forward: Callable[[Dims, int], Work]
    """Least work of the forward pass, from sizes and bytes per element."""
    backward: Callable[[Dims, int], Work] = _no_work
    """Least work of the backward pass; none where there is no gradient."""
    tolerance: Mapping[torch.dtype, Tolerance]
    """How far a result of each dtype may lie from the truth."""
    gradient_tolerance: Mapping[torch.dtype, Tolerance]
    """How far a gradient may lie from the truth."""
    example: Dims
    """Sizes of an ordinary small call, for which no backend is too large."""
    reference: Callable[..., Any]
    """The slow truth, in plain torch."""
    variants: tuple[Variant, ...] = ()
    """Calls that proofs try beside the example and the options' trials."""

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
        first = call.facts[0]
        for argument, fact in zip(self.arguments, call.facts, strict=True):
            if fact is None:
                if not argument.optional:
                    raise ArgumentError(self.name, argument.name, "None", "a tensor")
                continue
            self._check_dtype(argument, fact, call)
            if first is not None and fact.device != first.device:
                fits = f"on {first.device}, as {self.arguments[0].name} is"
                raise ArgumentError(self.name, argument.name, f"on {fact.device}", fits)
            self._bind_shape(argument, fact, sizes)
            if argument.mutated and _lies_on_itself(fact):
                got = f"of strides {describe(fact.strides)}, several elements in one place"
                raise ArgumentError(self.name, argument.name, got, "written element by element")
        options = {}
        for option, value in zip(self.options, call.options, strict=True):
            self.check_option(option, value)
            options[option.name] = value
        dims = {name: _count(size) for name, size in sizes.items()}
        for culprit, fits in self.rules(dims, options):
            raise ArgumentError(self.name, culprit, self._got(culprit, call, options), fits)
        return dims

    def _check_dtype(self, argument: Argument, fact: Fact, call: Call) -> None:
        if fact.dtype not in argument.dtypes:
            fits = " or ".join(describe(dtype) for dtype in argument.dtypes)
            raise ArgumentError(self.name, argument.name, describe(fact.dtype), fits)
        if argument.like is None:
            return
        position = [other.name for other in self.arguments].index(argument.like)
        model = call.facts[position]
        if model is not None and fact.dtype != model.dtype:
            fits = f"{describe(model.dtype)}, as {argument.like} is"
            raise ArgumentError(self.name, argument.name, describe(fact.dtype), fits)

    def _bind_shape(self, argument: Argument, fact: Fact, sizes: dict[str, Any]) -> None:
        """Give each symbol of `argument` its size, or check it against the one it has."""
        names, shape, known = argument.dims, fact.shape, dict(sizes)
        if names[0] == "..." and len(shape) >= len(names) - 1:
            names = names[1:]
            leading = shape[: len(shape) - len(names)]
            shape = shape[len(leading) :]
            if sizes.setdefault("...", leading) != leading:
                raise self._misshapen(argument, fact, known)
        if len(shape) != len(names):
            raise self._misshapen(argument, fact, known)
        for name, size in zip(names, shape, strict=True):
            if sizes.setdefault(name, size) != size:
                raise self._misshapen(argument, fact, known)
            if size == 0 and name in self.positive:
                raise self._misshapen(argument, fact, {}, f" with {name} at least 1")

    def _misshapen(
        self, argument: Argument, fact: Fact, sizes: Mapping[str, Any], limit: str = ""
    ) -> ArgumentError:
        fits = f"of shape {_form(argument.dims, sizes)}{limit}"
        return ArgumentError(self.name, argument.name, f"of shape {describe(fact.shape)}", fits)

    def _got(self, culprit: str, call: Call, options: Mapping[str, Any]) -> str:
        if culprit in options:
            return shown(options[culprit])
        for argument, fact in zip(self.arguments, call.facts, strict=True):
            if argument.name == culprit and fact is not None:
                return f"of shape {describe(fact.shape)}"
        return "None"

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
        sizes = {**self.example, **dims}
        facts: list[Fact | None] = []
        for argument in self.arguments:
            shape = tuple(sizes[name] for name in argument.dims)
            strides = torch.empty(shape, device="meta").stride()
            free = argument is self.arguments[0] or dtype in argument.dtypes
            fitting = dtype if free else argument.dtypes[0]
            fact = Fact(shape, fitting, torch.device(device), strides, True)
            facts.append(None if argument.name in without else fact)
        values = tuple((options or {}).get(each.name, each.default) for each in self.options)
        return Call(self.name, tuple(facts), values, chip=chip)

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
        sizes = {**self.example, **dims}
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


def describe(value: torch.dtype | Sequence[int | str]) -> str:
    """Write a dtype or a shape as users write it: ``bfloat16``, ``(2, 3)``."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return f"({', '.join([str(size) for size in value])}{',' if len(value) == 1 else ''})"


def _lies_on_itself(fact: Fact) -> bool:
    """Whether two elements may share memory, as those of an expanded tensor do."""
    reach = 0
    pairs = zip(fact.strides, fact.shape, strict=True)
    for stride, size in sorted((pair for pair in pairs if pair[1] != 1), key=lambda pair: pair[0]):
        if stride <= reach and 0 not in fact.shape:
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
