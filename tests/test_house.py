"""All packages have the same structure, so that a new one is easy to add."""

import re
import subprocess
import sys
from graphlib import TopologicalSorter

import grimp
import pytest

from packages import PACKAGES, ROOT, module_of, project_of

REQUIRED_FILES = [
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
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


@pytest.mark.parametrize("file", REQUIRED_FILES)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_all_required_files(package: str, file: str) -> None:
    """The list is also in CONTRIBUTING.md."""
    assert (ROOT / "packages" / package / file.format(module=module_of(package))).is_file()


IMPORTED_AS = {"pillow": "PIL", "pytest-timeout": "timeout", "s3fs": "s3"}
"""Names under which distributions appear in code, if different from their own."""


@pytest.mark.parametrize("package", PACKAGES)
def test_every_test_requirement_is_used(package: str) -> None:
    """Some file of the package mentions each distribution."""
    folder = ROOT / "packages" / package
    texts = [path.read_text() for path in (ROOT / "pyproject.toml", *folder.rglob("*.py"))]
    for line in (folder / "tests" / "requirements.txt").read_text().splitlines():
        name = re.match(r"(?:\./packages/)?([\w-]+)", line)
        if name is None:  # a comment
            continue
        word = IMPORTED_AS.get(name[1], name[1].replace("-", "_"))
        assert any(re.search(rf"\b{word}\b", text) for text in texts), line


@pytest.mark.parametrize("package", PACKAGES)
def test_a_readme_has_python_code(package: str) -> None:
    """Each README shows at least one Python block; `nox -s readme` runs them."""
    assert "```python" in (ROOT / "packages" / package / "README.md").read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_all_packages_have_the_same_apache_license(package: str) -> None:
    """One license, in the metadata and in each wheel."""
    assert project_of(package)["license"] == "Apache-2.0"
    license_text = (ROOT / "packages" / package / "LICENSE").read_bytes()
    assert license_text == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_help_of_every_command_has_an_example(package: str) -> None:
    """`python -m PACKAGE --help` exits with 0 and shows an example."""
    command = [sys.executable, "-m", module_of(package), "--help"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0
    assert "example" in run.stdout.lower()


def test_no_module_has_a_meaningless_name() -> None:
    """The house style bans catch-all modules."""
    banned = {"utils", "util", "common", "helpers", "misc", "manager"}
    offenders = [path for path in ROOT.glob("packages/*/src/**/*.py") if path.stem in banned]
    assert offenders == []


def paths_in_tree(page: str) -> list[str]:
    """Paths in the annotated directory tree of a page, in order."""
    tree = re.search(r"```text\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert tree, f"{page} must show the tree in a ```text block"
    return [line.split()[0] for line in tree[1].splitlines() if line.strip()]


def test_the_tree_in_the_readme_names_only_what_exists() -> None:
    """Each path in the annotated tree of README.md is in the repository."""
    paths = paths_in_tree("README.md")
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_chinese_readme_matches_the_english_one() -> None:
    """Same commands, code and tree, and tables of the same length."""
    pages = ("README.md", "README.zh-CN.md")
    assert paths_in_tree(pages[0]) == paths_in_tree(pages[1])
    texts = [(ROOT / page).read_text() for page in pages]
    code = [re.findall(r"```(?:bash|python)\n.*?```", text, flags=re.DOTALL) for text in texts]
    assert code[0] == code[1]
    rows = [re.findall(r"^\| ([\w -]*)", text, flags=re.MULTILINE) for text in texts]
    assert len(rows[0]) == len(rows[1])


def test_every_shared_file_is_linked_by_packages_that_need_it() -> None:
    """Each link in a package points to a file in shared_source/, and every such file is used."""
    shared = ROOT / "shared_source"
    links = [path for path in ROOT.glob("packages/*/**/*.py") if path.is_symlink()]
    targets = {path.resolve() for path in links if path.name != "hatch_build.py"}
    assert targets == set(shared.rglob("*.py"))


SOURCES = {
    package: ROOT / "packages" / package / "src" / module_of(package) for package in PACKAGES
}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_have_no_cycle(package: str) -> None:
    """Imports inside functions and for type checking count too."""
    graph = grimp.build_graph(
        module_of(package), exclude_type_checking_imports=False, cache_dir=None
    )
    order = TopologicalSorter(
        {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    )
    assert list(order.static_order())  # raises CycleError, which names the cycle


@pytest.mark.parametrize("folder", ["packages", "shared_source", "tests", "examples", "docs"])
def test_no_docstring_begins_with_of(folder: str) -> None:
    """A docstring such as "Of the last update." has no subject."""
    offenders = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.match(r'\s*r?"""Of\b', line)
    ]
    assert offenders == []


PRIVATE_TORCH_NAME = re.compile(
    r"\btorch\.(\w+\.)*_[a-z]\w+|from torch(\.\w+)*\._|_get_fsdp_state|_unsharded_param"
)


def test_private_torch_names_are_in_one_file_of_ms_parallel() -> None:
    """A new torch version then needs changes in one file."""
    sources = SOURCES["ms-parallel"]
    offenders = [
        f"{path.relative_to(sources)}:{number}: {line.strip()}"
        for path in sorted(sources.rglob("*.py"))
        if path.name != "torch_private.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE_TORCH_NAME.search(line) and "getLogger" not in line
    ]
    assert offenders == []
