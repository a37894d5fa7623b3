"""No package needs a sibling, and importing one is cheap."""

import ast
import re
import subprocess
import sys

import pytest

from packages import PACKAGES, module_of, project_of, sources_of


def imported_names(node: ast.AST) -> list[str]:
    """The modules that an import statement names; nothing for any other node."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        return [node.module]
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_imported_inside_functions_alone(package: str) -> None:
    """A sibling import at module or class level would make the extra a requirement."""
    siblings = {module_of(name) for name in PACKAGES if name != package}
    offers = [
        f"{path}:{node.lineno}"
        for path, tree in sources_of(package)
        for node in module_level(tree)
        if isinstance(node, ast.stmt)
        and any(name.split(".")[0] in siblings for name in imported_names(node))
    ]
    assert offers == []


def module_level(tree: ast.Module) -> list[ast.AST]:
    """All nodes that run on import, `if TYPE_CHECKING:` blocks left out."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        found.append(node)
        waiting.extend(ast.iter_child_nodes(node))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_imports_no_sibling_and_nothing_undeclared(package: str) -> None:
    """The modules that an import loads are torch's or its own declared ones, never a sibling."""
    code = f"import sys, {module_of(package)}; print(*sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert not loaded & {module_of(name) for name in PACKAGES if name != package}
    if not requires(package, "torch"):
        assert "torch" not in loaded


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_adds_half_a_second_at_most_to_what_it_needs(package: str) -> None:
    """Importing does nothing else, and is fast; what a requirement takes is not ours to mend."""
    needs = [module for module in ("torch", "numpy", "msgspec") if requires(package, module)]
    code = f"import time, {', '.join(needs)}; t = time.process_time(); import {module_of(package)};"
    code += "print(time.process_time() - t)"
    run = [sys.executable, "-c", code]
    # torch.distributed's tensor and checkpoint modules are loaded lazily by torch itself.
    limit = 1.5 if requires(package, "torch") else 0.5
    tries = (float(subprocess.check_output(run, text=True)) for _ in range(8))
    assert any(seconds < limit for seconds in tries)


def requires(package: str, module: str) -> bool:
    """Whether `module` is one of a package's hard requirements."""
    return any(re.match(rf"{module}\b", line) for line in project_of(package)["dependencies"])
