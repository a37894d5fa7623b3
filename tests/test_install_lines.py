"""The install lines of all pages are valid and sufficient."""

import ast
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from packages import PACKAGES, ROOT, project_of

PAGES = [
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
    ROOT / "docs" / "index.md",
    ROOT / "docs" / "install.md",
    *(ROOT / "packages" / package / "README.md" for package in PACKAGES),
]
PIP_INSTALL = re.compile(
    r"""(?:python -m )?pip install ((?:'[^']+'|"[^"]+"|[\w./\[\],<>=~*-]+|[ \t])+)"""
)
NAME = re.compile(r"(\./packages/)?(ms-[a-z]+)(?:\[([\w,-]+)\])?")


def lines_of(page: Path) -> list[list[tuple[bool, str, list[str]]]]:
    """For each install line: (from clone, name, extras) of each of our packages."""
    install_lines = []
    for arguments in PIP_INSTALL.findall(page.read_text()):
        parts = [NAME.fullmatch(word.strip("'\"")) for word in arguments.split()]
        packages = [
            (bool(match[1]), match[2], (match[3] or "").split(",")) for match in parts if match
        ]
        if packages:
            install_lines.append(packages)
    return install_lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_install_lines_are_valid_and_sufficient_for_a_clone(page: Path) -> None:
    """Packages and extras exist; siblings required by an extra come first."""
    for line in lines_of(page):
        for from_clone, name, extras in line:
            assert name in PACKAGES
            extras_of = project_of(name).get("optional-dependencies", {})
            for extra in filter(None, extras):
                assert extra in extras_of, f"{name} has no extra {extra}"
                siblings = {
                    Requirement(requirement).name for requirement in extras_of[extra]
                } & set(PACKAGES)
                # Older versions of pip search the index for a sibling that comes later.
                earlier = {
                    package for _, package, _ in line[: line.index((from_clone, name, extras))]
                }
                assert not from_clone or siblings <= earlier, (line, siblings)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_page_explains_installation_from_an_index_and_a_clone(page: Path) -> None:
    """The clone comes first while nothing is released; the index line says "once released".

    A package's own README installs that package in both ways.
    """
    assert lines_of(page)[0][0][0], "the first line must install from a clone"
    for line in page.read_text().splitlines():
        if re.match(r"pip install '?ms-", line):
            assert "once released" in line or "Once 0.1.0 is released" in page.read_text(), line
    owner = page.parent.name if page.parent.name in PACKAGES else None
    for from_clone in (False, True):
        names = {name for line in lines_of(page) for clone, name, _ in line if clone == from_clone}
        assert (owner in names) if owner else names, f"from a clone: {from_clone}"


def requirements_of(package: str, extras: list[str]) -> set[str]:
    """Distributions that a package requires with these extras."""
    project = project_of(package)
    extras_of = project.get("optional-dependencies", {})
    lines = [
        *project["dependencies"],
        *(requirement for extra in extras if extra for requirement in extras_of[extra]),
    ]
    return {Requirement(line).name.lower() for line in lines}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_readmes_install_line_covers_the_imports_of_its_code(package: str) -> None:
    """Checks the first line, for a clone; `nox -s install` runs the code after it."""
    page = ROOT / "packages" / package / "README.md"
    line = lines_of(page)[0]
    installed = {"torch"}.union(*(requirements_of(name, extras) for _, name, extras in line))
    our_modules = {name.replace("-", "_") for _, name, _ in line}
    imported = set()
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    third_party = imported - set(sys.stdlib_module_names) - our_modules
    assert {module for module in third_party if module.replace("_", "-") not in installed} == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_packages_readme_links_to_files_that_exist(package: str) -> None:
    """Checks relative links; a release rewrites them for the index."""
    page = ROOT / "packages" / package / "README.md"
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)[^)\s]*\)", text)
    for target in targets:
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("package", PACKAGES)
def test_a_changelog_without_a_version_says_not_released_yet(package: str) -> None:
    """An empty changelog would look like a release without changes."""
    text = (ROOT / "packages" / package / "CHANGELOG.md").read_text()
    assert bool(re.search(r"^## \d", text, re.MULTILINE)) != ("not released yet" in text)


def test_top_level_pages_link_to_files_that_exist() -> None:
    """The pages in the repository root."""
    for page in (ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), target
