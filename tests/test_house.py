"""Every package is built by the same pattern, so that the next one is easy to add."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from packages import PACKAGES, ROOT, module_of, project_of

PARTS = [
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "changes/.gitkeep",
    "src/{module}/__init__.py",
    "src/{module}/__main__.py",
    "src/{module}/cli.py",
    "src/{module}/errors.py",
    "src/{module}/py.typed",
    "tests/alone.py",
    "tests/requirements.txt",
    "benchmarks/README.md",
    "benchmarks/bench.py",
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_every_part_of_the_pattern(package: str, part: str) -> None:
    """What CONTRIBUTING.md lists is there."""
    assert (ROOT / "packages" / package / part.format(module=module_of(package))).is_file()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_readme_has_code_that_runs(package: str) -> None:
    """Each README shows at least one Python block; `nox -s readme` runs them."""
    assert "```python" in (ROOT / "packages" / package / "README.md").read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_licence_is_apache_and_the_same_everywhere(package: str) -> None:
    """One licence, stated in the metadata and shipped in each wheel."""
    assert project_of(package)["license"] == "Apache-2.0"
    there = (ROOT / "packages" / package / "LICENSE").read_bytes()
    assert there == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_command_answers_help_with_an_example(package: str) -> None:
    """`python -m PACKAGE --help` exits 0 and shows how to begin."""
    command = [sys.executable, "-m", module_of(package), "--help"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0
    assert "example" in run.stdout.lower()


def test_no_module_has_a_name_that_says_nothing() -> None:
    """The house style bans the usual drawers for odds and ends."""
    banned = {"utils", "util", "common", "helpers", "misc", "manager"}
    found = [path for path in ROOT.glob("packages/*/src/**/*.py") if path.stem in banned]
    assert found == []


def test_the_tree_in_the_readme_names_only_what_exists() -> None:
    """Each path of the captioned tree in README.md stands in the repository."""
    text = (ROOT / "README.md").read_text()
    tree = re.search(r"```text\n(.*?)```", text, flags=re.DOTALL)
    assert tree, "README.md shows the tree in a ```text block"
    paths = [line.split()[0] for line in tree[1].splitlines() if line.strip()]
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
