"""Asks a function in a process of its own, which is not one of the run's.

Question and answer are records (`msgspec.Struct`), checked as they are decoded, each behind its
size, which is checked before memory is taken for it. So what comes out of a pipe can be nothing but
values: nothing is unpickled.
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

LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
"""Variables that would make it one of the processes that have met."""
CALLED = "import sys; from ms_parallel.planner.apart import answer; answer(int(sys.argv[1]))"
LIMIT_BYTES = 1 << 24
"""The largest question or answer: a plan of thousands of ranks has a hundredth of it."""
SIZE_BYTES = 8
"""What says how large the record behind it is, the highest byte first."""
SHOWN_BYTES = 4096
"""What is looked at of the last that a process has said."""


class _Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="call.v1"):
    function: str
    question: msgspec.Raw


class _Found(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="found.v1"):
    value: msgspec.Raw


class _Raised(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="raised.v1"
):
    error: str
    """Name of a class of `ms_parallel.errors`."""
    text: str


def call_in_subprocess(function: str, question: msgspec.Struct, answer: Any) -> Any:
    """Return what a function of this package answers in a new process.

    Args:
        function: as `module:name`; its one parameter is a Struct.
        question: what it is given.
        answer: the type of its result, which is checked.

    Raises:
        ParallelError: what the function raises, of the same class; or the process has ended without
            a result, or what it was asked or has answered is no such record.
    """
    call = _Call(function=function, question=msgspec.Raw(_encoded(question, function)))
    content, said = _exchange(_framed(_encoded(call, function)))
    if content is None:
        raise ParallelError(f"{function} ended without a result: {said}")
    found = _decoded(content, _Found | _Raised, function)
    if isinstance(found, _Raised):
        raise _errors().get(found.error, ParallelError)(found.text)
    return _decoded(bytes(found.value), answer, function)


def answer(descriptor: int) -> None:
    """Do what standard input asks, and write the result to a descriptor.

    Whatever is printed meanwhile goes elsewhere, and is no part of it.
    """
    content = _read(sys.stdin.buffer)
    if content is None:
        return
    call = _decoded(content, _Call, "a question")
    try:
        value = _function(call.function)(call.question)
        found: _Found | _Raised = _Found(value=msgspec.Raw(_encoded(value, call.function)))
    except ParallelError as error:
        found = _Raised(error=type(error).__name__, text=str(error))
    with os.fdopen(descriptor, "wb") as results:
        results.write(_framed(_encoded(found, call.function)))


def _exchange(sent: bytes) -> tuple[bytes | None, str]:
    """Return what a new process answers, None for nothing, and the last line that it has said."""
    readable, writable = os.pipe()
    with open(readable, "rb") as results, TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", CALLED, str(writable)],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                pass_fds=(writable,),
                env={name: value for name, value in os.environ.items() if name not in LAUNCH},
            )
        finally:
            os.close(writable)
        with process:
            try:
                assert process.stdin is not None  # it is a pipe
                with suppress(BrokenPipeError), process.stdin as questions:
                    questions.write(sent)
                content = _read(results)
            except BaseException:
                process.kill()
                raise
        return content, _last_line(said)


def _last_line(said: IO[bytes]) -> str:
    said.seek(max(0, said.seek(0, os.SEEK_END) - SHOWN_BYTES))
    return "".join(said.read().decode(errors="replace").strip().splitlines()[-1:])


def _function(name: str) -> Callable[[msgspec.Raw], Any]:
    """Find a function of this package; what it returns takes a record, decoded for it."""
    module, _, own = name.partition(":")
    if not module.startswith("ms_parallel."):
        raise ParallelError(f"{name} is no function of this package, and no other is called")
    found = getattr(import_module(module), own)
    (kind,) = (hint for argument, hint in get_type_hints(found).items() if argument != "return")
    return lambda question: found(_decoded(bytes(question), kind, name))


def _errors() -> dict[str, type[ParallelError]]:
    """Collect every error of the package by its name."""
    found, left = {}, [ParallelError]
    while left:
        kind = left.pop()
        found[kind.__name__] = kind
        left += kind.__subclasses__()
    return found


def _framed(content: bytes) -> bytes:
    return len(content).to_bytes(SIZE_BYTES, "big") + content


def _read(stream: IO[bytes]) -> bytes | None:
    """Read a record; None where the stream ends before its bytes do.

    Raises:
        ParallelError: it is said to be larger than any that is sent.
    """
    head = stream.read(SIZE_BYTES)
    if len(head) < SIZE_BYTES:
        return None
    size = int.from_bytes(head, "big")
    if size > LIMIT_BYTES:
        raise ParallelError(f"a record of {size:,} bytes is announced; the most is {LIMIT_BYTES:,}")
    content = stream.read(size)
    return content if len(content) == size else None


def _encoded(value: Any, function: str) -> bytes:
    with decoding(f"what is told to or by {function}", error=ParallelError):
        content = msgspec.msgpack.encode(value)
        if len(content) > LIMIT_BYTES // 2:  # with what stands around it
            raise ParallelError(
                f"{function} is told, or tells, {len(content):,} bytes; the most is"
                f" {LIMIT_BYTES // 2:,}"
            )
        return content


def _decoded(content: bytes, kind: Any, where: str) -> Any:
    with decoding(where, error=ParallelError):
        return msgspec.msgpack.decode(content, type=kind)
