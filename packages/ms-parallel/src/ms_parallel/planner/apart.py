"""Calls a function of this package in a subprocess that does not take part in the run.

Arguments and result are records (`msgspec.Struct`), validated when decoded, each preceded by its
size, which is checked before memory is allocated. Nothing is unpickled, so the pipe can deliver
only plain values.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from tempfile import TemporaryFile
from typing import IO, Any, get_type_hints

import msgspec

from ms_parallel.errors import ParallelError
from ms_parallel.files.untrusted import decoding

LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
"""Variables that would make the subprocess join the process group."""
PROGRAM = "import sys; from ms_parallel.planner.apart import run_call; run_call(int(sys.argv[1]))"
LIMIT_BYTES = 1 << 24
"""Maximum size of arguments or result; a plan for thousands of ranks is 100 times smaller."""
SIZE_BYTES = 8
"""Bytes of the size before a record, in big-endian order."""
TAIL_BYTES = 4096
"""Bytes at the end of the output that are searched for the last line."""


class _Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="call.v1"):
    function: str
    arguments: msgspec.Raw


class _Result(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="result.v1"
):
    value: msgspec.Raw


class _Raised(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="raised.v1"
):
    error: str
    """Name of a class of `ms_parallel.errors`."""
    text: str


def call_in_subprocess(function: str, arguments: msgspec.Struct, result_type: Any) -> Any:
    """Call a function of this package in a subprocess and return its result.

    Args:
        function: function as `module:name`, with one Struct parameter.
        arguments: argument of the function.
        result_type: type of its result, for validation.

    Raises:
        ParallelError: the function's own error, with the same class; or the subprocess died, or the
            arguments or result are invalid.
    """
    call = _Call(function=function, arguments=msgspec.Raw(_encoded(arguments, function)))
    content, last_line = _exchange(_framed(_encoded(call, function)))
    if content is None:
        raise ParallelError(f"{function} ended without a result: {last_line}")
    result = _decoded(content, _Result | _Raised, function)
    if isinstance(result, _Raised):
        raise _errors().get(result.error, ParallelError)(result.text)
    return _decoded(bytes(result.value), result_type, function)


def run_call(descriptor: int) -> None:
    """Run the call read from standard input, and write its result to a file descriptor.

    Standard output is not used, as the function may print.
    """
    content = _read(sys.stdin.buffer)
    if content is None:
        return
    call = _decoded(content, _Call, "a call")
    try:
        value = _function(call.function)(call.arguments)
        result: _Result | _Raised = _Result(value=msgspec.Raw(_encoded(value, call.function)))
    except ParallelError as error:
        result = _Raised(error=type(error).__name__, text=str(error))
    with os.fdopen(descriptor, "wb") as results:
        results.write(_framed(_encoded(result, call.function)))


def _exchange(request: bytes) -> tuple[bytes | None, str]:
    """Run the subprocess; return its result (None without one) and its last line of output."""
    readable, writable = os.pipe()
    # Output goes to a file, as an unread pipe would block the subprocess once it is full.
    with open(readable, "rb") as results, TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(writable)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(writable,),
                env={
                    name: value
                    for name, value in os.environ.items()
                    if name not in LAUNCH_VARIABLES
                },
            )
        finally:
            # The subprocess has its own copy; with this one open, reading would never see the end.
            os.close(writable)
        with process:
            try:
                assert process.stdin is not None  # it is a pipe
                # A subprocess that died has closed its input; `_read` then returns None.
                with suppress(BrokenPipeError), process.stdin as stdin:
                    stdin.write(request)
                content = _read(results)
            except BaseException:  # such as an interrupt: leave no process behind
                process.kill()
                raise
        return content, _last_line(output)


def _last_line(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL_BYTES))
    return "".join(output.read().decode(errors="replace").strip().splitlines()[-1:])


def _function(name: str) -> Callable[[msgspec.Raw], Any]:
    """Look up a function of this package, wrapped to decode its argument."""
    module, _, attribute = name.partition(":")
    if not module.startswith("ms_parallel."):
        raise ParallelError(f"{name} is not a function of ms_parallel; only those can be called")
    function = getattr(import_module(module), attribute)
    (argument_type,) = (
        hint for argument, hint in get_type_hints(function).items() if argument != "return"
    )
    return lambda arguments: function(_decoded(bytes(arguments), argument_type, name))


def _errors() -> dict[str, type[ParallelError]]:
    """All error classes of the package by name."""
    classes, pending = {}, [ParallelError]
    while pending:
        error_class = pending.pop()
        classes[error_class.__name__] = error_class
        pending += error_class.__subclasses__()
    return classes


def _framed(content: bytes) -> bytes:
    return len(content).to_bytes(SIZE_BYTES, "big") + content


def _read(stream: IO[bytes]) -> bytes | None:
    """Read a record; None if the stream ends early.

    Raises:
        ParallelError: the announced size exceeds the limit.
    """
    prefix = stream.read(SIZE_BYTES)
    if len(prefix) < SIZE_BYTES:
        return None
    size = int.from_bytes(prefix, "big")
    if size > LIMIT_BYTES:
        raise ParallelError(f"a record has {size:,} bytes; the maximum is {LIMIT_BYTES:,}")
    content = stream.read(size)
    return content if len(content) == size else None


def _encoded(value: Any, function: str) -> bytes:
    with decoding(f"arguments or result of {function}", error=ParallelError):
        content = msgspec.msgpack.encode(value)
        if len(content) > LIMIT_BYTES // 2:  # leaves room for the enclosing record
            raise ParallelError(
                f"arguments or result of {function} have {len(content):,} bytes; the maximum is"
                f" {LIMIT_BYTES // 2:,}"
            )
        return content


def _decoded(content: bytes, record_type: Any, context: str) -> Any:
    with decoding(context, error=ParallelError):
        return msgspec.msgpack.decode(content, type=record_type)
