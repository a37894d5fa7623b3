"""No package requires a sibling, and importing a package is cheap."""

import ast
import re
import subprocess
import sys

import pytest

from packages import PACKAGES, module_of, project_of, sources_of


def imported_names(node: ast.AST) -> list[str]:
    """Modules that an import statement names; empty for other nodes."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        return [node.module]
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_imported_only_inside_functions(package: str) -> None:
    """A sibling import at module or class level would make the extra a requirement."""
    siblings = {module_of(name) for name in PACKAGES if name != package}
    offenders = [
        f"{path}:{node.lineno}"
        for path, tree in sources_of(package)
        for node in module_level(tree)
        if isinstance(node, ast.stmt)
        and any(name.split(".")[0] in siblings for name in imported_names(node))
    ]
    assert offenders == []


def module_level(tree: ast.Module) -> list[ast.AST]:
    """Nodes that run on import, except `if TYPE_CHECKING:` blocks."""
    nodes: list[ast.AST] = []
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        nodes.append(node)
        pending.extend(ast.iter_child_nodes(node))
    return nodes


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_loads_no_sibling_and_no_undeclared_torch(package: str) -> None:
    """An import loads torch only if it is a requirement."""
    code = f"import sys, {module_of(package)}; print(*sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert not loaded & {module_of(name) for name in PACKAGES if name != package}
    if not requires(package, "torch"):
        assert "torch" not in loaded


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_adds_at_most_half_a_second_to_its_requirements(package: str) -> None:
    """The import time of the requirements does not count."""
    needed = [module for module in ("torch", "numpy", "msgspec") if requires(package, module)]
    code = (
        f"import time, {', '.join(needed)}; t = time.process_time(); import {module_of(package)};"
    )
    code += "print(time.process_time() - t)"
    run = [sys.executable, "-c", code]
    # torch.distributed's tensor and checkpoint modules are loaded lazily by torch itself.
    limit = 1.5 if requires(package, "torch") else 0.5
    times_s = (float(subprocess.check_output(run, text=True)) for _ in range(8))
    assert any(seconds < limit for seconds in times_s)


def requires(package: str, module: str) -> bool:
    """Whether `module` is a hard requirement of a package."""
    return any(re.match(rf"{module}\b", line) for line in project_of(package)["dependencies"])
