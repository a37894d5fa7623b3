"""Print the largest functions, files and folders of each package.

Sizes are information for reviewers, not limits: one function of 80 clear lines beats four of 20
lines that pass a bundle of values along.
"""

import ast
import heapq
import sys
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[1] / "packages"
TOP = 5


def main() -> int:
    """Print one table per package."""
    for package in sorted(PACKAGES.iterdir()):
        source = package / "src"
        files = {path: path.read_text(encoding="utf-8") for path in source.rglob("*.py")}
        lines = {path: text.count("\n") for path, text in files.items()}
        modules: dict[Path, int] = {}
        functions: list[tuple[int, str]] = []
        for path, text in files.items():
            modules[path.parent] = modules.get(path.parent, 0) + 1
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    size = (node.end_lineno or node.lineno) - node.lineno + 1
                    functions.append(
                        (size, f"{path.relative_to(source)}:{node.lineno} {node.name}")
                    )
        total = sum(lines.values())
        sys.stdout.write(f"{package.name}: {len(files)} files, {total:,} lines\n")
        names = {str(path.relative_to(source)): count for path, count in lines.items()}
        folders = {str(path.relative_to(source)): count for path, count in modules.items()}
        for title, entries in (
            ("lines per function", functions),
            ("lines per file", [(count, name) for name, count in names.items()]),
            ("modules per folder", [(count, name) for name, count in folders.items()]),
        ):
            sys.stdout.write(f"  {title}\n")
            for size, name in heapq.nlargest(TOP, entries):
                sys.stdout.write(f"  {size:7,}  {name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
