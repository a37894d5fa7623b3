"""Folders, modules and metadata of the packages, for the tests of the whole repository."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir())


def module_of(package: str) -> str:
    """Import name of a package."""
    return package.replace("-", "_")


def project_of(package: str) -> dict[str, Any]:
    """`[project]` table of a package's pyproject.toml."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


def sources_of(package: str) -> Iterator[tuple[Path, ast.Module]]:
    """Yield each source file of a package with its syntax tree."""
    for path in sorted((ROOT / "packages" / package / "src").rglob("*.py")):
        yield path, ast.parse(path.read_text())
