"""Names that a torch_npu wheel expects of CANN: those it links against, and those it looks up."""

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
    """What the stub libraries must offer."""

    operators: tuple[str, ...]
    """aclnn calls, without the suffix of their first phase, in order."""
    others: tuple[str, ...]
    """Every other function and object, in order."""


def names_of(wheel: Path, torch_folder: Path) -> Names:
    """Read the names off the libraries of an installed torch_npu.

    Args:
        wheel: folder of the package `torch_npu`.
        torch_folder: folder of the package `torch`, whose symbols are not missing.

    Raises:
        NullRuntimeError: when a folder holds no libraries, or nm is absent.
    """
    own = sorted([*wheel.glob("_C*.so"), *wheel.glob("lib/*.so")])
    if not own:
        raise NullRuntimeError(f"{wheel} holds no libraries; it must be an installed torch_npu")
    theirs = sorted(torch_folder.glob("lib/*.so"))
    process = ctypes.CDLL(None)  # offers the C library's names
    missing = {
        name for name in undefined(own) - defined([*own, *theirs]) if not hasattr(process, name)
    }
    found = {name for library in own for name in looked_up(library.read_bytes())}
    operators = {name.removesuffix(PHASE) for name in found if name.startswith("aclnn")}
    others = {name for name in missing | found if not name.startswith("aclnn")}
    return Names(operators=tuple(sorted(operators)), others=tuple(sorted(others)))


def undefined(libraries: Iterable[Path]) -> set[str]:
    """Return the unversioned names that the libraries take from others, but for Python's."""
    names = _nm("--undefined-only", libraries)
    return {name for name in names if "@" not in name and not re.match(r"_?Py|__", name)}


def defined(libraries: Iterable[Path]) -> set[str]:
    """Return the names that the libraries offer."""
    return {name.split("@")[0] for name in _nm("--defined-only", libraries)}


def looked_up(content: bytes) -> set[str]:
    """Return the names among a library's strings that it may look up as it runs."""
    return {name.decode() for name in NAME.findall(content)}


def _nm(what: str, libraries: Iterable[Path]) -> set[str]:
    """Return names of the dynamic symbols; weak undefined ones are not needed."""
    if shutil.which("nm") is None:
        raise NullRuntimeError(
            "nm is not on the PATH; install binutils, which come with a C compiler"
        )
    command = ["nm", "-D", what, *map(str, libraries)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in listing.splitlines())
    return {row[-1] for row in rows if len(row) >= 2 and row[-2] not in ("w", "v")}
