"""Remote calls between judged code and its tests.

An object that is not plain data stays in the process that created it; the other process gets a
`Remote` proxy. A proxy can be called, read, set, indexed and iterated. It cannot be compared, added
or converted to bool: the judged code would evaluate these operators, and so could learn the
expected value or fake the verdict.
"""

import json
from collections.abc import Callable, Iterator
from typing import IO, Any, NoReturn

from .values import Codec, UnreadableError, error_type

MAX_LINE_BYTES = 16 << 20
"""Size limit of one message in bytes."""
_MUTABLE = (list, dict, set, bytearray)


class PeerExited(BaseException):
    """The other process has exited. Not an Exception, so that tests do not catch it."""


class Peer:
    """One end of the connection. Each side waits for the other, so that calls can nest."""

    def __init__(self, reading: IO[bytes], writing: IO[bytes], only_calls: bool) -> None:
        self._reading, self._writing, self._only_calls = reading, writing, only_calls
        self._objects: dict[int, object] = {}
        self._codec = Codec(self._register, self._objects.__getitem__, Remote, self._connect)

    def ask(self, kind: str, *arguments: object) -> Any:
        """Send a request; return its result or raise its error.

        Raises:
            PeerExited: the other process has exited.
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
        """Call a remote object; also apply its changes to mutable arguments."""
        value, changed = self.ask("call", number, arguments, named)
        for index, changed_value in dict(changed).items():
            _replace(arguments[index], changed_value)
        return value

    def serve(self) -> None:
        """Answer requests until the other side ends."""
        try:
            while True:
                self._serve(*self._receive())
        except PeerExited:
            return

    def offer(self, names: dict[str, object]) -> None:
        """Set the names that the other side can request."""
        self._names = names

    def _serve(self, kind: str, content: Any) -> None:
        try:
            arguments = self._codec.load(content)
            if self._only_calls and kind != "call":
                raise TypeError("only functions that were passed as arguments can be called")
            answer = ["value", self._codec.dump(getattr(self, f"_on_{kind}")(*arguments))]
        except PeerExited:
            raise
        except BaseException as error:  # including SystemExit: a call that exits has failed
            answer = ["error", _names_of(error)]
        self._send(answer)

    def _on_names(self, requested: list[str]) -> dict[str, object]:
        return {name: self._names[name] for name in requested if name in self._names}

    def _on_call(self, number: int, arguments: list[Any], named: dict[str, Any]) -> Any:
        # Mutable arguments were copied to this process; send back the ones that the call changed.
        before = [
            self._codec.dump(argument) for argument in arguments if isinstance(argument, _MUTABLE)
        ]
        value = self._objects[number](*arguments, **named)  # type: ignore[operator]
        indices = [
            index for index, argument in enumerate(arguments) if isinstance(argument, _MUTABLE)
        ]
        changed = {
            index: arguments[index]
            for index, old in zip(indices, before, strict=True)
            if self._codec.dump(arguments[index]) != old
        }
        return [value, changed]

    def _on_read(self, number: int, name: str) -> Any:
        return getattr(self._objects[number], name)

    def _on_set(self, number: int, name: str, value: object) -> None:
        setattr(self._objects[number], name, value)

    def _on_special(self, number: int, function: str, *arguments: object) -> Any:
        target: Any = self._objects[number]
        return _SPECIAL[function](target, *arguments)

    def _register(self, value: object) -> int:
        self._objects[id(value)] = value
        return id(value)

    def _connect(self, number: int) -> "Remote":
        return Remote(self, number)

    def _send(self, message: list[Any]) -> None:
        try:
            self._writing.write(json.dumps(message).encode() + b"\n")
            self._writing.flush()
        except OSError:
            raise PeerExited("the response's process has ended") from None

    def _receive(self) -> tuple[str, Any]:
        line = self._reading.readline(MAX_LINE_BYTES)
        if not line:
            raise PeerExited("the response's process has ended")
        try:
            kind, content = json.loads(line)
        except (ValueError, TypeError):
            raise UnreadableError(
                "the response's process sent an invalid or too long message"
            ) from None
        return str(kind), content


def _set_item(container: Any, key: object, value: object) -> None:
    container[key] = value


_SPECIAL: dict[str, Callable[..., Any]] = {
    "item": lambda container, key: container[key],
    "set_item": _set_item,
    "length": len,
    "walk": iter,
    "next": next,
    "text": str,
    "code": repr,
}


class Remote:
    """Proxy of an object in the other process."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: object, **named: object) -> Any:
        """Call the object in its own process."""
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
        iterator = _special(self, "walk")
        return iterator if isinstance(iterator, Remote) else iter(iterator)

    def __next__(self) -> Any:
        return _special(self, "next")

    def __str__(self) -> str:
        return str(_special(self, "text"))

    def __repr__(self) -> str:
        return str(_special(self, "code"))

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("the response returned an object; compare, add or test its plain values")

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


def _replace(value: Any, contents: Any) -> None:
    if isinstance(value, list | bytearray):
        value[:] = contents
    elif isinstance(value, dict | set):
        value.clear()
        value.update(contents)


def _names_of(error: BaseException) -> list[Any]:
    return [[cls.__name__ for cls in type(error).__mro__], str(error)[:2000]]


def _error_of(content: Any) -> Exception:
    names, text = content
    error_class = error_type(names)
    try:
        return error_class(str(text))
    except TypeError:  # UnicodeDecodeError takes five arguments
        return RuntimeError(f"{names[0]}: {text}")
