"""Calls a function of this package in a subprocess that does not take part in the run.

Arguments and result are records (`msgspec.Struct`) in files of a temporary folder, which are
validated when they are read. Nothing is unpickled.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_type_hints

import msgspec

from ms_parallel.errors import ParallelError
from ms_parallel.files.untrusted import decoding

LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
"""Variables that would make the subprocess join the process group."""
PROGRAM = (
    "import sys; from ms_parallel.planner.subprocess_call import run_call; run_call(sys.argv[1])"
)
CALL, RESULT = "call.msgpack", "result.msgpack"


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: str
    arguments: msgspec.Raw


class _Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="result"):
    value: msgspec.Raw


class _Raised(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="raised"):
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
    call = _Call(function, msgspec.Raw(_encoded(arguments, function)))
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCH_VARIABLES}
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / CALL).write_bytes(_encoded(call, function))
        # The output goes to a file, as the function and the modules that it imports may print.
        with open(folder / "output", "w+b") as output:
            command = [sys.executable, "-c", PROGRAM, name]
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                check=False,
            )
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
        if not (folder / RESULT).exists():
            raise ParallelError(f"{function} ended without a result: {''.join(lines[-1:])}")
        result = _decoded((folder / RESULT).read_bytes(), _Result | _Raised, function)
    if isinstance(result, _Raised):
        raise _error_classes().get(result.error, ParallelError)(result.text)
    return _decoded(result.value, result_type, function)


def run_call(folder: str) -> None:
    """Run the call in a folder and write its result there."""
    call = _decoded(Path(folder, CALL).read_bytes(), _Call, "a call")
    function, argument_type = _function(call.function)
    try:
        value = function(_decoded(call.arguments, argument_type, call.function))
        result: _Result | _Raised = _Result(msgspec.Raw(_encoded(value, call.function)))
    except ParallelError as error:
        result = _Raised(type(error).__name__, str(error))
    partial = Path(folder, "partial")
    partial.write_bytes(_encoded(result, call.function))
    partial.rename(Path(folder, RESULT))


def _function(name: str) -> tuple[Callable[[Any], Any], Any]:
    """Return a function of this package and the type of its only parameter."""
    module, _, attribute = name.partition(":")
    if not module.startswith("ms_parallel."):
        raise ParallelError(f"{name} is not a function of ms_parallel; only those can be called")
    function = getattr(import_module(module), attribute)
    (argument_type,) = (
        hint for parameter, hint in get_type_hints(function).items() if parameter != "return"
    )
    return function, argument_type


def _error_classes() -> dict[str, type[ParallelError]]:
    """Return all error classes of the package by name."""
    classes, pending = {}, [ParallelError]
    while pending:
        error_class = pending.pop()
        classes[error_class.__name__] = error_class
        pending += error_class.__subclasses__()
    return classes


def _encoded(value: Any, function: str) -> bytes:
    with decoding(f"arguments or result of {function}", error=ParallelError):
        return msgspec.msgpack.encode(value)


def _decoded(content: bytes | msgspec.Raw, record_type: Any, context: str) -> Any:
    with decoding(context, error=ParallelError):
        return msgspec.msgpack.decode(content, type=record_type)
