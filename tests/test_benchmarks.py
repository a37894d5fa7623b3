"""Benchmarks and examples import names that exist; default tests run few of them."""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted([*ROOT.glob("packages/*/benchmarks/**/*.py"), *ROOT.glob("examples/**/*.py")])


def missing(path: Path) -> list[str]:
    """Names that a script imports from our packages but that do not exist."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ms_"):
            module = import_module(str(node.module))
            names += [
                f"{node.module}.{alias.name}"
                for alias in node.names
                if not hasattr(module, alias.name)
                and not (hasattr(module, "__path__") and find_spec(f"{node.module}.{alias.name}"))
            ]
    return names


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_all_imports_of_a_script_exist(path: Path) -> None:
    """Renames are caught without running the benchmarks."""
    assert missing(path) == []


def test_a_missing_import_is_reported(tmp_path: Path) -> None:
    """Submodules exist; unknown names do not."""
    script = tmp_path / "bench.py"
    script.write_text("from ms_data import corpus, nowhere\nfrom ms_data.corpus import gone\n")
    assert missing(script) == ["ms_data.nowhere", "ms_data.corpus.gone"]
