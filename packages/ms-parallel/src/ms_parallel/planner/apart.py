"""Calls a function in a process of its own, which is not one of the run's.

Arguments and results are pickled, as they may be any value of a run, such as its loss. Both
ends are this program, and the pipes between them are open to no one else: nothing is unpickled from
a file.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from types import ModuleType
from typing import Any

from ms_parallel.errors import ParallelError

LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
"""Variables that would make it one of the processes that have met."""
CALLED = "from ms_parallel.planner.apart import answer; answer()"


def call_apart(function: str, *args: Any, **settings: Any) -> Any:
    """Call a function in a new process and return its result; arguments and result are copied.

    Args:
        function: as `module:name`.
        args: of it; modules among them are imported there.
        settings: of it.

    Raises:
        ParallelError: what the function raises, or the process has ended without a result.
    """
    done = subprocess.run(
        [sys.executable, "-c", CALLED],
        input=_pickled((function, args, settings)),
        capture_output=True,
        env={name: value for name, value in os.environ.items() if name not in LAUNCH},
        check=False,
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ParallelError(f"{function} ended without a result: {''.join(last)}")
    found = pickle.loads(done.stdout)  # noqa: S301 - our own
    if isinstance(found, ParallelError):
        raise found
    return found


def answer() -> None:
    """Call what standard input names, and give the result to standard output."""
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever is printed is no part of a result
    name, args, settings = pickle.load(sys.stdin.buffer)  # noqa: S301 - our own
    module, _, function = name.partition(":")
    try:
        found = getattr(import_module(module), function)(*args, **settings)
    except ParallelError as error:
        found = error
    with results:
        results.write(_pickled(found))


class _Pickler(pickle.Pickler):
    """Modules, such as a run's operators, go by their names."""

    def reducer_override(self, value: Any) -> tuple[Callable[[str], ModuleType], tuple[str]] | Any:
        if isinstance(value, ModuleType):
            return import_module, (value.__name__,)
        return NotImplemented


def _pickled(value: Any) -> bytes:
    kept = BytesIO()
    _Pickler(kept).dump(value)
    return kept.getvalue()
