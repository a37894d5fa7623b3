"""Inputs of ms-kernels: tuning tables and ahead-of-time libraries.

No command takes their paths (tables are in the package, programs load libraries), so the cases call
the functions that read them.
"""

import hashlib
import json
from pathlib import Path

from fuzz.case import Case, function

TABLES = Path(__file__).parents[2] / "packages" / "ms-kernels" / "src" / "ms_kernels" / "tables"


def table(folder: Path) -> None:
    """Copy a committed table."""
    (folder / "cpu-avx512.json").write_bytes((TABLES / "cpu-avx512.json").read_bytes())


def library(folder: Path) -> None:
    """Write a folder with a manifest and its library file."""
    content = b"\x7fELF" + bytes(60)
    (folder / "lib").mkdir()
    (folder / "lib" / "libms_kernels.so").write_bytes(content)
    file = {"path": "libms_kernels.so", "size_bytes": len(content)}
    file["sha256"] = hashlib.sha256(content).hexdigest()
    kernel = {
        "name": "scale",
        "dtype": "bfloat16",
        "parameters": [{"name": "X", "kind": "pointer", "multiple_of": 16}],
        "tiles": "cdiv(rows, 4)",
        "limits": {"width": "4096"},
        "constants": {"BLOCK": 128},
        **dict.fromkeys(("registers", "spilled_bytes", "shared_bytes"), 0),
        "matrix_instructions": 0,
        "vector_bits": 128,
    }
    manifest = {"format": "ms-kernels.1", "target": "sm_90", "library": file["path"]}
    manifest |= {"version": "0.1.0", "compiler": "none", "kernels": [kernel], "files": [file]}
    (folder / "lib" / "manifest.json").write_text(json.dumps(manifest))


CASES = (
    Case(
        name="table",
        make=table,
        files=("*.json",),
        run=function("ms_kernels.core.tables", "read_table", "cpu-avx512.json", "KernelError"),
        weight=2,
    ),
    Case(
        name="manifest",
        make=library,
        files=("lib/manifest.json",),
        run=function("ms_kernels.aot.manifest", "read_manifest", "lib", "KernelError"),
        weight=2,
    ),
    Case(
        name="library",
        make=library,
        files=("lib/*",),
        run=function("ms_kernels.aot", "load", "lib", "KernelError"),
        exit_code=2,
    ),
)
