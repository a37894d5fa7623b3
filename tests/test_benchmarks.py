"""Benchmarks and examples, which no default test runs to their end, name what there is."""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted([*ROOT.glob("packages/*/benchmarks/**/*.py"), *ROOT.glob("examples/**/*.py")])


def missing(path: Path) -> list[str]:
    """What a script imports from our packages, and is not there."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ms_"):
            module = import_module(str(node.module))
            found += [
                f"{node.module}.{alias.name}"
                for alias in node.names
                if not hasattr(module, alias.name)
                and not (hasattr(module, "__path__") and find_spec(f"{node.module}.{alias.name}"))
            ]
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_imports_is_there(path: Path) -> None:
    """A name that has moved is found before somebody measures."""
    assert missing(path) == []


def test_a_name_that_has_moved_is_found(tmp_path: Path) -> None:
    """Modules of a package count, names that are nowhere do not."""
    script = tmp_path / "bench.py"
    script.write_text("from ms_data import corpus, nowhere\nfrom ms_data.corpus import gone\n")
    assert missing(script) == ["ms_data.nowhere", "ms_data.corpus.gone"]
