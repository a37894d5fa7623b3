"""Versions agree wherever they are written."""

import importlib

import pytest
from packaging.requirements import Requirement

from packages import PACKAGES, module_of, project_of


@pytest.mark.parametrize("package", PACKAGES)
def test_the_module_states_the_version_of_its_project(package: str) -> None:
    """`__version__` is the static version of pyproject.toml."""
    module = importlib.import_module(module_of(package))
    assert module.__version__ == project_of(package)["version"]


@pytest.mark.parametrize("package", PACKAGES)
def test_an_extra_with_a_sibling_allows_its_current_version(package: str) -> None:
    """Bounds such as `ms-data>=0.1,<0.2` include the version in this tree."""
    for lines in project_of(package).get("optional-dependencies", {}).values():
        for requirement in map(Requirement, lines):
            if requirement.name in PACKAGES:
                assert len(requirement.specifier) == 2, f"{requirement} needs both bounds"
                version = project_of(requirement.name)["version"]
                assert requirement.specifier.contains(version), f"{package}: {requirement}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_requires_the_same_torch(package: str) -> None:
    """All packages require the range of torch in the documentation."""
    project = project_of(package)
    optional = project.get("optional-dependencies", {}).values()
    lines = project["dependencies"] + [line for extra in optional for line in extra]
    specifiers = {str(r.specifier) for r in map(Requirement, lines) if r.name == "torch"}
    assert specifiers <= {"<2.16,>=2.11"}
