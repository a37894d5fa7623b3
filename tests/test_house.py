"""Every package is built by the same pattern, so that the next one is easy to add."""

import re
import subprocess
import sys
from graphlib import TopologicalSorter

import grimp
import pytest

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


WRITTEN_AS = {"pillow": "PIL", "pytest-timeout": "timeout", "s3fs": "s3"}
"""Distributions by what their users write, where that is not their own name."""


@pytest.mark.parametrize("package", PACKAGES)
def test_what_the_tests_ask_for_is_used(package: str) -> None:
    """A distribution that nobody names is installed for nothing."""
    place = ROOT / "packages" / package
    texts = [path.read_text() for path in (ROOT / "pyproject.toml", *place.rglob("*.py"))]
    for line in (place / "tests" / "requirements.txt").read_text().splitlines():
        name = re.match(r"(?:\./packages/)?([\w-]+)", line)
        if name is None:  # a remark
            continue
        word = WRITTEN_AS.get(name[1], name[1].replace("-", "_"))
        assert any(re.search(rf"\b{word}\b", text) for text in texts), line


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


def paths_of_the_tree(page: str) -> list[str]:
    """The paths that the captioned tree of a page names, in order."""
    tree = re.search(r"```text\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert tree, f"{page} shows the tree in a ```text block"
    return [line.split()[0] for line in tree[1].splitlines() if line.strip()]


def test_the_tree_in_the_readme_names_only_what_exists() -> None:
    """Each path of the captioned tree in README.md stands in the repository."""
    paths = paths_of_the_tree("README.md")
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_chinese_page_says_what_the_english_one_does() -> None:
    """Commands and code are the same, the trees name the same, the tables have as many rows."""
    pages = ("README.md", "README.zh-CN.md")
    assert paths_of_the_tree(pages[0]) == paths_of_the_tree(pages[1])
    texts = [(ROOT / page).read_text() for page in pages]
    code = [re.findall(r"```(?:bash|python)\n.*?```", text, flags=re.DOTALL) for text in texts]
    assert code[0] == code[1]
    rows = [re.findall(r"^\| ([\w -]*)", text, flags=re.MULTILINE) for text in texts]
    assert len(rows[0]) == len(rows[1])


def test_every_shared_file_is_linked_by_packages_that_need_it() -> None:
    """Each link in a package leads to a file of shared_source/, and no such file is unused."""
    shared = ROOT / "shared_source"
    links = [path for path in ROOT.glob("packages/*/**/*.py") if path.is_symlink()]
    targets = {path.resolve() for path in links if path.name != "hatch_build.py"}
    assert targets == set(shared.rglob("*.py"))


SOURCES = {
    package: ROOT / "packages" / package / "src" / module_of(package) for package in PACKAGES
}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_have_no_cycle(package: str) -> None:
    """Imports inside functions and for type checking count as well."""
    graph = grimp.build_graph(
        module_of(package), exclude_type_checking_imports=False, cache_dir=None
    )
    order = TopologicalSorter(
        {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    )
    assert list(order.static_order())  # raises CycleError, which names the cycle


@pytest.mark.parametrize("folder", ["packages", "shared_source", "tests", "examples", "docs"])
def test_no_docstring_begins_with_of(folder: str) -> None:
    """A sentence names what it is about; "Of the last update." is no sentence."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.match(r'\s*r?"""Of\b', line)
    ]
    assert found == []


PRIVATE_OF_TORCH = re.compile(
    r"\btorch\.(\w+\.)*_[a-z]\w+|from torch(\.\w+)*\._|_get_fsdp_state|_unsharded_param"
)


def test_private_names_of_torch_are_in_one_file_of_ms_parallel() -> None:
    """A new version of torch is then checked in one place."""
    sources = SOURCES["ms-parallel"]
    found = [
        f"{path.relative_to(sources)}:{number}: {line.strip()}"
        for path in sorted(sources.rglob("*.py"))
        if path.name != "torch_private.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE_OF_TORCH.search(line) and "getLogger" not in line
    ]
    assert found == []
