"""What the pages tell a reader to install is there, is enough, and is said on every page."""

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
WORDS = re.compile(
    r"""(?:python -m )?pip install ((?:'[^']+'|"[^"]+"|[\w./\[\],<>=~*-]+|[ \t])+)"""
)
NAME = re.compile(r"(\./packages/)?(ms-[a-z]+)(?:\[([\w,-]+)\])?")


def lines_of(page: Path) -> list[list[tuple[bool, str, list[str]]]]:
    """For each line that installs packages of ours: from the clone or not, name and extras."""
    found = []
    for words in WORDS.findall(page.read_text()):
        parts = [NAME.fullmatch(word.strip("'\"")) for word in words.split()]
        ours = [(bool(p[1]), p[2], (p[3] or "").split(",")) for p in parts if p]
        if ours:
            found.append(ours)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_an_install_line_names_what_is_there_and_all_that_a_clone_needs(page: Path) -> None:
    """Packages and extras exist; a sibling that an extra asks for comes before it."""
    for line in lines_of(page):
        for from_clone, name, extras in line:
            assert name in PACKAGES
            known = project_of(name).get("optional-dependencies", {})
            for extra in filter(None, extras):
                assert extra in known, f"{name} has no extra {extra}"
                siblings = {Requirement(one).name for one in known[extra]} & set(PACKAGES)
                # Older versions of pip look on the index for a sibling that comes later.
                before = {other for _, other, _ in line[: line.index((from_clone, name, extras))]}
                assert not from_clone or siblings <= before, (line, siblings)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_page_says_how_to_install_from_an_index_and_from_a_clone(page: Path) -> None:
    """A package's page names the package itself in both, and as nothing is released a clone first.

    The line for an index says that it is for later.
    """
    assert lines_of(page)[0][0][0], "the first line installs from a clone"
    for line in page.read_text().splitlines():
        if re.match(r"pip install '?ms-", line):
            assert "once released" in line or "Once 0.1.0 is released" in page.read_text(), line
    owner = page.parent.name if page.parent.name in PACKAGES else None
    for from_clone in (False, True):
        names = {name for line in lines_of(page) for clone, name, _ in line if clone == from_clone}
        assert (owner in names) if owner else names, f"from a clone: {from_clone}"


def needs_of(package: str, extras: list[str]) -> set[str]:
    """What a package brings with these extras: names of distributions."""
    project = project_of(package)
    known = project.get("optional-dependencies", {})
    lines = [
        *project["dependencies"],
        *(each for extra in extras if extra for each in known[extra]),
    ]
    return {Requirement(line).name.lower() for line in lines}


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_readmes_code_imports_comes_with_its_install_line(package: str) -> None:
    """The first line is for a clone; `nox -s install` runs the code with what it installs."""
    page = ROOT / "packages" / package / "README.md"
    line = lines_of(page)[0]
    brought = {"torch"}.union(*(needs_of(name, extras) for _, name, extras in line))
    named = {name.replace("-", "_") for _, name, _ in line}
    asked = set()
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Import):
                asked |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                asked.add((node.module or "").partition(".")[0])
    foreign = asked - set(sys.stdlib_module_names) - named
    assert {module for module in foreign if module.replace("_", "-") not in brought} == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_packages_readme_links_to_files_that_exist(package: str) -> None:
    """Relative links are followed in the repository; a release rewrites them for the index."""
    page = ROOT / "packages" / package / "README.md"
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)[^)\s]*\)", text)
    for target in targets:
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("package", PACKAGES)
def test_a_changelog_without_a_version_says_that_none_is_released(package: str) -> None:
    """An empty changelog would be read as a release that changed nothing."""
    text = (ROOT / "packages" / package / "CHANGELOG.md").read_text()
    assert bool(re.search(r"^## \d", text, re.MULTILINE)) != ("not released yet" in text)


def test_a_page_links_to_files_that_are_there() -> None:
    """The pages at the top of the repository, which are read where they lie."""
    for page in (ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), target
