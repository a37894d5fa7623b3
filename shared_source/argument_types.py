"""Type checks of arguments and attrs fields, derived from their annotations.

The checks know the types that public functions take: plain types, unions, literals, classes,
sequences, mappings and callables. Of a Protocol they require the methods. Any other
annotation, such as a name that is imported for type checkers only, accepts every value.
"""

import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from attrs import Attribute

from .errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
MAX_CHARACTERS = 80
SHOWN = (str, bytes, bool, int, float, types.NoneType)
"""Types whose values are shown in a message; other values are described by their type."""
DESCRIPTIONS: dict[str, str] = {
    "Callable": "a function",
    "Collection": "a list",
    "Iterable": "a list",
    "Mapping": "a dict",
    "Module": "a torch.nn.Module",
    "NoneType": "None",
    "Path": "a path",
    "Sequence": "a list",
    "Tensor": "a torch.Tensor",
    "bool": "True or False",
    "dtype": "a torch.dtype",
    "float": "a number",
    "int": "an integer",
    "str": "a string",
    "tuple": "a tuple",
}


def check_types(function: Callable[P, R]) -> Callable[P, R]:
    """Check the types of a function's arguments before it runs.

    The decorated function raises ConfigError if an argument has another type than annotated, or
    is NaN.
    """
    signature = inspect.signature(function)
    namespace = getattr(inspect.unwrap(function), "__globals__", {})

    @functools.cache
    def expected_types() -> dict[str, Any]:
        # Evaluated at the first call, when all names that the annotations quote are defined.
        return {
            parameter.name: _evaluate(parameter.annotation, namespace)
            for parameter in signature.parameters.values()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        expected = expected_types()
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            check_type(name, value, expected.get(name, Any))
        return function(*args, **kwargs)

    return checked


def checked_fields(owner: type, fields: "list[Attribute[Any]]") -> "list[Attribute[Any]]":
    """Check the types of an attrs class's fields that have no validator.

    Use it as the `field_transformer` of the class. If a field has a converter, its argument is
    checked against the converter's annotation first.
    """

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        check_type(attribute.name, value, attribute.type)

    return [
        field
        if field.validator
        else field.evolve(
            converter=_checked_converter(field.name, field.converter), validator=check
        )
        for field in fields
    ]


def _checked_converter(name: str, convert: Any) -> Any:
    """Return a converter that checks the type of its argument first."""
    if not inspect.isfunction(convert):
        return convert
    parameter = next(iter(inspect.signature(convert).parameters.values()))
    expected = _evaluate(parameter.annotation, convert.__globals__)

    @functools.wraps(convert)
    def checked(value: object) -> object:
        check_type(name, value, expected)
        return convert(value)

    return checked


def check_type(name: str, value: object, expected: Any) -> None:
    """Check a value against an annotation.

    Raises:
        ConfigError: the value has another type, or is NaN.
    """
    if isinstance(value, float) and math.isnan(value) and expected not in (Any, object):
        raise ConfigError(f"{name} must be a number, got nan")
    if not _matches(value, expected):
        raise ConfigError(f"{name} must be {_describe(expected)}, got {_shown(value)}")


def check_minimum(name: str, value: float | None, minimum: float) -> None:
    """Check a number that may be None.

    Raises:
        ConfigError: the number is below the minimum.
    """
    if value is not None and not value >= minimum:
        raise ConfigError(f"{name} must be at least {minimum}, got {_shown(value)}")


def _evaluate(annotation: Any, namespace: Mapping[str, Any]) -> Any:
    """Evaluate a quoted annotation; Any if it names something imported for type checkers only."""
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, dict(namespace))  # an annotation of our own source code
    except NameError:
        return Any


def _matches(value: object, expected: Any) -> bool:
    """Return whether a value has a type; True if the type cannot be checked."""
    origin, args = get_origin(expected), get_args(expected)
    if expected is None:
        return value is None
    if isinstance(expected, TypeVar):
        return expected.__bound__ is None or _matches(value, expected.__bound__)
    if origin in (Union, types.UnionType):
        return any(_matches(value, option) for option in args)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in args)
    kind = origin or expected
    if kind is Callable:
        return callable(value)
    if not isinstance(kind, type) or kind in (Any, object):
        return True
    if getattr(kind, "_is_protocol", False):
        return all(hasattr(value, name) for name in _methods(kind))
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if issubclass(kind, tuple) and not hasattr(kind, "_fields"):
        kind = Sequence  # a list serves as well, as from a run file
    if not isinstance(value, kind):
        return False
    if issubclass(kind, Mapping) and len(args) == 2 and isinstance(value, dict):
        return all(_matches(k, args[0]) and _matches(v, args[1]) for k, v in value.items())
    if issubclass(kind, Iterable) and not issubclass(kind, str | bytes):
        # A string is a sequence of strings, and a dict iterates over its keys; neither is meant.
        if isinstance(value, str | bytes | Mapping) and not issubclass(kind, Mapping):
            return False
        items = value if isinstance(value, list | tuple) else ()
        if origin is tuple and args[-1:] != (...,):
            return len(items) == len(args) and all(map(_matches, items, args))
        return all(_matches(item, args[0]) for item in items) if args else True
    return True


def _methods(protocol: type) -> set[str]:
    """Return the methods of a Protocol; its properties might be costly to evaluate."""
    return {
        name
        for base in protocol.__mro__
        if getattr(base, "_is_protocol", False)
        for name, member in vars(base).items()
        if inspect.isfunction(member) and (not name.startswith("_") or name == "__call__")
    }


def _describe(expected: Any) -> str:
    """Describe a type in words, such as "a list of strings, or None"."""
    origin, args = get_origin(expected), get_args(expected)
    if isinstance(expected, TypeVar):
        return _describe(expected.__bound__)
    if origin in (Union, types.UnionType):
        options = list(dict.fromkeys(_describe(option) for option in args))
        if "a number" in options:  # includes integers and fractions
            options = [option for option in options if option not in ("an integer", "a Fraction")]
        return " or ".join([", ".join(options[:-1]), options[-1]]) if options[1:] else options[0]
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    kind = origin or expected
    name = getattr(kind, "__name__", str(kind))
    if isinstance(kind, type) and "__call__" in _methods(kind):
        name = "Callable"  # a Protocol of functions
    words = DESCRIPTIONS.get(name, f"a {name}" if kind is not None else "None")
    items = [_describe(arg) for arg in args if arg is not ...]
    if (
        items
        and words in ("a list", "a tuple", "a dict")
        and items[-1] not in ("a Any", "a object")
    ):
        return f"{words} whose items are each {items[-1]}"
    return words


def _shown(value: object) -> str:
    """Show a value in one line of bounded length."""
    if not isinstance(value, SHOWN):
        return f"a {type(value).__name__}"
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a large integer"
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."
