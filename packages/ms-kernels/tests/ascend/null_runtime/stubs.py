"""Stub libraries in CANN's place, made from symbol names alone and compiled with cc."""

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
"""Names under which torch_npu asks for CANN, beside ``libascendcl.so``, which holds everything."""

HERE = Path(__file__).parent
WRITTEN = ("memory.c", "descriptors.c")
FLAGS = ("-shared", "-fPIC", "-O1", "-fvisibility=hidden")


def build(folder: Path, names: Names) -> Path:
    """Compile the stub libraries into `folder`, which is made, and return the main one.

    Raises:
        NullRuntimeError: when there is no C compiler, or it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [HERE / name for name in WRITTEN]
    probe = folder / "libprobe.so"
    _compile(probe, *map(str, written), "-Wl,--unresolved-symbols=ignore-all")
    generated = folder / "entry_points.c"
    generated.write_text(source_of(names, defined([probe])))
    probe.unlink()
    main = folder / "libascendcl.so"
    _compile(main, *map(str, [*written, generated]), "-Wl,-soname,libascendcl.so", "-lpthread")
    link = ("-Wl,--no-as-needed", f"-L{folder}", "-lascendcl", "-Wl,-rpath,$ORIGIN")
    for name in LIBRARIES:
        _compile(folder / name, f"-Wl,-soname,{name}", "-x", "c", os.devnull, *link)
    return main


def source_of(names: Names, written: set[str]) -> str:
    """Write in C what is generated: every name that is not `written` by hand."""
    parts = ['#include "runtime.h"\n']
    for name in names.operators:
        body = BODIES.get(name)
        parts.append(entry_point(name, None if body is None else parameters_of(body)))
    parts += [_absent(name) for name in names.others if name not in written]
    return "".join(parts)


def _absent(name: str) -> str:
    """Write something that CANN offers and the null runtime does not."""
    if name.startswith("_ZT"):  # a virtual table or type information: an object
        return f"EXPORT char {name}[4096];\n"
    if name.startswith("Msprof"):  # the profiler's hooks, asked on every call
        return f"EXPORT int {name}(void) {{ return 0; }}\n"
    if "Create" in name and not name.startswith("_Z"):
        return f'EXPORT void *{name}(void) {{ null_absent("{name}"); return 0; }}\n'
    return f'EXPORT int {name}(void) {{ return null_absent("{name}"); }}\n'


def _compile(result: Path, *arguments: str) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise NullRuntimeError("there is no C compiler; install one, or name it in CC")
    command = [compiler, *FLAGS, f"-I{HERE}", "-o", str(result), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        first = next(iter(done.stderr.splitlines()), "it says nothing")
        raise NullRuntimeError(f"{compiler} could not make {result.name}: {first}")
