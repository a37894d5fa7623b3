"""Stub libraries that replace CANN, generated from symbol names and compiled with cc."""

import os
import shutil
import subprocess
from pathlib import Path

from .bodies import BODIES
from .errors import NullRuntimeError
from .signatures import entry_point, parameters_of
from .symbols import Names, defined

__all__ = ["LIBRARIES", "build", "source_of"]

LIBRARIES = (
    "libopapi.so",
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)
"""Library names that torch_npu loads besides ``libascendcl.so``, which exports everything."""

SOURCES = Path(__file__).parent
HAND_WRITTEN = ("memory.c", "descriptors.c")
FLAGS = ("-shared", "-fPIC", "-O1", "-fvisibility=hidden")


def build(folder: Path, names: Names) -> Path:
    """Compile the stub libraries into `folder`, which is created, and return the main one.

    Raises:
        NullRuntimeError: when there is no C compiler, or it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sources = [SOURCES / name for name in HAND_WRITTEN]
    probe = folder / "libprobe.so"
    _compile(probe, *map(str, sources), "-Wl,--unresolved-symbols=ignore-all")
    generated = folder / "entry_points.c"
    generated.write_text(source_of(names, defined([probe])))
    probe.unlink()
    main = folder / "libascendcl.so"
    _compile(main, *map(str, [*sources, generated]), "-Wl,-soname,libascendcl.so", "-lpthread")
    link = ("-Wl,--no-as-needed", f"-L{folder}", "-lascendcl", "-Wl,-rpath,$ORIGIN")
    for name in LIBRARIES:
        _compile(folder / name, f"-Wl,-soname,{name}", "-x", "c", os.devnull, *link)
    return main


def source_of(names: Names, hand_written: set[str]) -> str:
    """Generate C source for every name that is not `hand_written`."""
    parts = ['#include "runtime.h"\n']
    for name in names.operators:
        body = BODIES.get(name)
        parts.append(entry_point(name, None if body is None else parameters_of(body)))
    parts += [_absent(name) for name in names.others if name not in hand_written]
    return "".join(parts)


def _absent(name: str) -> str:
    """Return the C definition of a symbol that the null runtime does not implement."""
    if name.startswith("_ZT"):  # a virtual table or type information: an object
        return f"EXPORT char {name}[4096];\n"
    if name.startswith("Msprof"):  # profiler hooks, called on every operation
        return f"EXPORT int {name}(void) {{ return 0; }}\n"
    if "Create" in name and not name.startswith("_Z"):
        return f'EXPORT void *{name}(void) {{ null_absent("{name}"); return 0; }}\n'
    return f'EXPORT int {name}(void) {{ return null_absent("{name}"); }}\n'


def _compile(result: Path, *arguments: str) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise NullRuntimeError("there is no C compiler; install one, or name it in CC")
    command = [compiler, *FLAGS, f"-I{SOURCES}", "-o", str(result), *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        message = next(iter(process.stderr.splitlines()), "no message")
        raise NullRuntimeError(f"{compiler} could not build {result.name}: {message}")
