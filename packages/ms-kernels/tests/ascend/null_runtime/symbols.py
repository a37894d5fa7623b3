"""Names that a torch_npu wheel expects from CANN: linked symbols and symbols looked up by name."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from attrs import frozen

from .errors import NullRuntimeError

__all__ = ["Names", "defined", "looked_up", "names_of", "undefined"]

NAME = re.compile(rb"\x00(acl(?:nn|rt|mdl|op|sys|prof)?[A-Z]\w{1,120})(?=\x00)")
PHASE = "GetWorkspaceSize"


@frozen(kw_only=True)
class Names:
    """Names that the stub libraries must export."""

    operators: tuple[str, ...]
    """aclnn calls without the suffix of their first phase, sorted."""
    others: tuple[str, ...]
    """All other functions and objects, sorted."""


def names_of(wheel: Path, torch_folder: Path) -> Names:
    """Read the names from the libraries of an installed torch_npu.

    Args:
        wheel: folder of the package `torch_npu`.
        torch_folder: folder of the package `torch`, whose symbols are provided.

    Raises:
        NullRuntimeError: when a folder contains no libraries, or nm is absent.
    """
    wheel_libraries = sorted([*wheel.glob("_C*.so"), *wheel.glob("lib/*.so")])
    if not wheel_libraries:
        raise NullRuntimeError(f"{wheel} holds no libraries; it must be an installed torch_npu")
    torch_libraries = sorted(torch_folder.glob("lib/*.so"))
    process = ctypes.CDLL(None)  # provides the C library's names
    missing = {
        name
        for name in undefined(wheel_libraries) - defined([*wheel_libraries, *torch_libraries])
        if not hasattr(process, name)
    }
    looked_up_names = {
        name for library in wheel_libraries for name in looked_up(library.read_bytes())
    }
    operators = {name.removesuffix(PHASE) for name in looked_up_names if name.startswith("aclnn")}
    others = {name for name in missing | looked_up_names if not name.startswith("aclnn")}
    return Names(operators=tuple(sorted(operators)), others=tuple(sorted(others)))


def undefined(libraries: Iterable[Path]) -> set[str]:
    """Return the unversioned names that the libraries import, except Python's own."""
    names = _nm("--undefined-only", libraries)
    return {name for name in names if "@" not in name and not re.match(r"_?Py|__", name)}


def defined(libraries: Iterable[Path]) -> set[str]:
    """Return the names that the libraries export."""
    return {name.split("@")[0] for name in _nm("--defined-only", libraries)}


def looked_up(content: bytes) -> set[str]:
    """Return the strings in a library that look like names it resolves at run time."""
    return {name.decode() for name in NAME.findall(content)}


def _nm(selection: str, libraries: Iterable[Path]) -> set[str]:
    """Return names of the dynamic symbols; weak undefined ones are not required."""
    if shutil.which("nm") is None:
        raise NullRuntimeError(
            "nm is not on the PATH; install binutils, which come with a C compiler"
        )
    command = ["nm", "-D", selection, *map(str, libraries)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in listing.splitlines())
    return {row[-1] for row in rows if len(row) >= 2 and row[-2] not in ("w", "v")}
