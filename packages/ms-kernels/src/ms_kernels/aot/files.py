"""Files of a library: atomic writes, checksums, and the C compiler."""

import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from ms_kernels.aot.manifest import File
from ms_kernels.errors import BackendError

LIBRARY = "libms_kernels.so"


def run_compiler(
    arguments: Sequence[str], output: Sequence[str], work: Path, variable: str = "CC"
) -> None:
    """Run the machine's C compiler in a folder.

    Raises:
        BackendError: the compiler is missing or fails; the message has its first error.
    """
    default = {"CC": "cc", "CXX": "c++"}[variable]
    command = (os.environ.get(variable) or default).split()
    if shutil.which(command[0]) is None:
        build_compiler = sysconfig.get_config_var(variable)
        remedy = f"install one, or set {variable} (Python was built with {build_compiler})"
        raise BackendError(f"the compiler {command[0]!r} is not installed; {remedy}")
    process = subprocess.run(
        [*command, *arguments, *output], cwd=work, capture_output=True, text=True
    )
    if process.returncode:
        errors = [line for line in process.stderr.splitlines() if "error" in line]
        reason = (errors or process.stderr.splitlines() or ["no message"])[0]
        raise BackendError(f"{command[0]} failed: {reason}")


def file_of(folder: Path, name: str) -> File:
    """Return the manifest entry of a file."""
    content = (folder / name).read_bytes()
    return File(name, len(content), hashlib.sha256(content).hexdigest())


def own_version() -> str:
    """Return the version of this package."""
    return str(import_module("ms_kernels").__version__)


def write(path: Path, content: bytes) -> None:
    """Write a file atomically, so that an interruption never leaves a partial file."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    # "x": never follow a link that another user placed at the predictable name.
    with temporary.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
