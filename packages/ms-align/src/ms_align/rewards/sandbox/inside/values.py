"""Values as JSON: plain data crosses between the judged code and its tests, and nothing else.

What is written by code that nobody has read is never unpickled: whatever the other side sends,
reading it makes plain values of the builtin types, or a `Remote`.
"""

import builtins
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any

_BUILTIN: dict[str, type[Any]] = {
    one.__name__: one for one in (int, float, str, bool, list, tuple, set, dict, bytes)
}
_TEXT: dict[str, Callable[[str], object]] = {
    "Decimal": Decimal,
    "Fraction": Fraction,
    "date": date.fromisoformat,
    "datetime": datetime.fromisoformat,
    "time": time.fromisoformat,
}
_TEXT_KINDS = (Decimal, Fraction, date, datetime, time)
_SERIES: dict[str, type[Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "bytearray": bytearray,
    "bytes": bytes,
}
_SMALL = 1 << 53


class UnreadableError(Exception):
    """What the other side sent is no value."""


class Codec:
    """Writes and reads values; `keep` numbers an object that stays here, `find` gives it back."""

    def __init__(
        self,
        keep: Callable[[object], int],
        find: Callable[[int], object],
        remote: type[Any],
        connect: Callable[[int], object],
    ) -> None:
        self._keep, self._find, self._remote, self._connect = keep, find, remote, connect

    def dump(self, value: object) -> Any:
        """Convert a value to what `json.dumps` takes."""
        kind = type(value)
        if value is None or kind is bool or kind is float or kind is str:
            return value
        if isinstance(value, int):
            return int(value) if -_SMALL < value < _SMALL else {"int": hex(value)}
        if isinstance(value, float | str):
            return float(value) if isinstance(value, float) else str.__str__(value)
        if isinstance(value, dict):
            return {"dict": [[self.dump(key), self.dump(one)] for key, one in value.items()]}
        if isinstance(value, list):
            return [self.dump(one) for one in value]
        for name, series in _SERIES.items():
            if isinstance(value, series):
                return {name: [self.dump(one) for one in value]}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, range):
            return {"range": [value.start, value.stop, value.step]}
        if kind in _TEXT_KINDS:
            return {type(value).__name__: str(value)}
        if isinstance(value, type) and value in _BUILTIN.values():
            return {"type": value.__name__}
        if isinstance(value, type) and issubclass(value, Exception):
            return {"error": [one.__name__ for one in value.__mro__]}
        if kind is self._remote:
            return {"yours": object.__getattribute__(value, "_number")}
        return {"mine": self._keep(value)}

    def load(self, value: Any) -> Any:
        """Read the value that was written.

        Raises:
            UnreadableError: it is none.
        """
        if isinstance(value, list):
            return [self.load(one) for one in value]
        if not isinstance(value, dict):
            return value
        try:
            ((name, content),) = value.items()
            return self._load(name, content)
        except (TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise UnreadableError(f"the other side sent no value: {error}") from None

    def _load(self, name: str, content: Any) -> Any:
        if name == "dict":
            return {self.load(key): self.load(one) for key, one in content}
        if name in _SERIES:
            return _SERIES[name](self.load(one) for one in content)
        if name in _TEXT:
            return _TEXT[name](str(content))
        if name == "int":
            return int(content, 16)
        if name == "complex":
            return complex(*content)
        if name == "range":
            return range(*content)
        if name == "type":
            return _BUILTIN[content]
        if name == "error":
            return error_type(content)
        if name == "yours":
            return self._find(content)
        if name == "mine":
            return self._connect(int(content))
        raise ValueError(name)


@cache
def _error_type(name: str, base: str) -> type[Exception]:
    kind: type[Exception] = getattr(builtins, base)
    return kind if name == base else type(name, (kind,), {})


def error_type(names: Sequence[str]) -> type[Exception]:
    """Find the class of an exception of the other side, by the names of its bases.

    A builtin one is itself; another one is an empty class of that name beneath the first builtin
    one, the same at each asking.
    """
    for name in names:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            return _error_type(str(names[0]), kind.__name__)
    return RuntimeError  # SystemExit and its like, which end a call and not the tests
