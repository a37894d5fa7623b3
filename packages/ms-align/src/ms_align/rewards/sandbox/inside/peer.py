"""The wire between judged code and its tests: each side calls what the other one holds.

An object that is no plain data stays where it was made, and the other side holds a `Remote`. It
can be called, read, set, indexed and walked through. It is never compared, added or taken for
true: such an operator would be answered by the judged code, which then knew the value expected of
it, or spoke the verdict itself.
"""

import json
from collections.abc import Callable, Iterator
from typing import IO, Any, NoReturn

from .values import Codec, UnreadableError, error_type

LONGEST_LINE = 16 << 20
"""Bytes of one message."""
_MUTABLE = (list, dict, set, bytearray)


class Gone(BaseException):
    """The other side has ended; no `except Exception` in a test takes it for the test's error."""


class Peer:
    """One end of the wire. Each side waits while the other one works, so calls may nest."""

    def __init__(self, reading: IO[bytes], writing: IO[bytes], only_calls: bool) -> None:
        self._reading, self._writing, self._only_calls = reading, writing, only_calls
        self._kept: dict[int, object] = {}
        self._codec = Codec(self._keep, self._kept.__getitem__, Remote, self._connect)

    def ask(self, kind: str, *arguments: object) -> Any:
        """Have the other side do something, and return its value or raise its error.

        Raises:
            Gone: the other side has ended.
        """
        self._send([kind, self._codec.dump(list(arguments))])
        while True:
            kind, content = self._receive()
            if kind == "value":
                return self._codec.load(content)
            if kind == "error":
                raise _error_of(content)
            self._serve(kind, content)

    def call(self, number: int, arguments: list[object], named: dict[str, object]) -> Any:
        """Call a kept object; lists, dicts and sets that it changes are changed here too."""
        value, changed = self.ask("call", number, arguments, named)
        for index, after in dict(changed).items():
            _replace(arguments[index], after)
        return value

    def serve(self) -> None:
        """Answer until the other side ends."""
        try:
            while True:
                self._serve(*self._receive())
        except Gone:
            return

    def offer(self, names: dict[str, object]) -> None:
        """Set what the other side may ask for by name."""
        self._names = names

    def _serve(self, kind: str, content: Any) -> None:
        try:
            arguments = self._codec.load(content)
            if self._only_calls and kind != "call":
                raise TypeError("only functions that were handed over can be called")
            answer = ["value", self._codec.dump(getattr(self, f"_on_{kind}")(*arguments))]
        except Gone:
            raise
        except BaseException as error:  # SystemExit too: a call that ends is a call that failed
            answer = ["error", _names_of(error)]
        self._send(answer)

    def _on_names(self, wanted: list[str]) -> dict[str, object]:
        return {name: self._names[name] for name in wanted if name in self._names}

    def _on_call(self, number: int, arguments: list[Any], named: dict[str, Any]) -> Any:
        before = [self._codec.dump(one) for one in arguments if isinstance(one, _MUTABLE)]
        value = self._kept[number](*arguments, **named)  # type: ignore[operator]
        indices = [index for index, one in enumerate(arguments) if isinstance(one, _MUTABLE)]
        changed = {
            index: arguments[index]
            for index, old in zip(indices, before, strict=True)
            if self._codec.dump(arguments[index]) != old
        }
        return [value, changed]

    def _on_read(self, number: int, name: str) -> Any:
        return getattr(self._kept[number], name)

    def _on_set(self, number: int, name: str, value: object) -> None:
        setattr(self._kept[number], name, value)

    def _on_special(self, number: int, function: str, *arguments: object) -> Any:
        kept: Any = self._kept[number]
        return _SPECIAL[function](kept, *arguments)

    def _keep(self, value: object) -> int:
        self._kept[id(value)] = value
        return id(value)

    def _connect(self, number: int) -> "Remote":
        return Remote(self, number)

    def _send(self, message: list[Any]) -> None:
        try:
            self._writing.write(json.dumps(message).encode() + b"\n")
            self._writing.flush()
        except OSError:
            raise Gone("the response's program has ended") from None

    def _receive(self) -> tuple[str, Any]:
        line = self._reading.readline(LONGEST_LINE)
        if not line:
            raise Gone("the response's program has ended")
        try:
            kind, content = json.loads(line)
        except (ValueError, TypeError):
            raise UnreadableError(
                "the response's program sent no message, or one too long"
            ) from None
        return str(kind), content


def _set_item(holder: Any, key: object, value: object) -> None:
    holder[key] = value


_SPECIAL: dict[str, Callable[..., Any]] = {
    "item": lambda holder, key: holder[key],
    "set_item": _set_item,
    "length": len,
    "walk": iter,
    "next": next,
    "text": str,
    "code": repr,
}


class Remote:
    """An object that lives on the other side."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: object, **named: object) -> Any:
        """Call it where it lives."""
        return _peer(self).call(_number(self), list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        return _peer(self).ask("read", _number(self), name)

    def __setattr__(self, name: str, value: object) -> None:
        _peer(self).ask("set", _number(self), name, value)

    def __getitem__(self, key: object) -> Any:
        return _special(self, "item", key)

    def __setitem__(self, key: object, value: object) -> None:
        _special(self, "set_item", key, value)

    def __len__(self) -> int:
        return int(_special(self, "length"))

    def __iter__(self) -> Iterator[Any]:
        walk = _special(self, "walk")
        return walk if isinstance(walk, Remote) else iter(walk)

    def __next__(self) -> Any:
        return _special(self, "next")

    def __str__(self) -> str:
        return str(_special(self, "text"))

    def __repr__(self) -> str:
        return str(_special(self, "code"))

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("the response gave an object; compare, add or test its plain values")

    __hash__ = None  # type: ignore[assignment]
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __bool__ = _refuse


def _peer(remote: Remote) -> Peer:
    peer: Peer = object.__getattribute__(remote, "_peer")
    return peer


def _number(remote: Remote) -> int:
    number: int = object.__getattribute__(remote, "_number")
    return number


def _special(remote: Remote, function: str, *arguments: object) -> Any:
    return _peer(remote).ask("special", _number(remote), function, *arguments)


def _replace(value: Any, after: Any) -> None:
    if isinstance(value, list | bytearray):
        value[:] = after
    elif isinstance(value, dict | set):
        value.clear()
        value.update(after)


def _names_of(error: BaseException) -> list[Any]:
    return [[kind.__name__ for kind in type(error).__mro__], str(error)[:2000]]


def _error_of(content: Any) -> Exception:
    names, text = content
    kind = error_type(names)
    try:
        return kind(str(text))
    except TypeError:  # UnicodeDecodeError takes five arguments
        return RuntimeError(f"{names[0]}: {text}")
