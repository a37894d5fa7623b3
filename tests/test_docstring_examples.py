"""Every example after `>>>` in a docstring runs, and prints what the docstring shows."""

import doctest
import importlib

import pytest

from packages import PACKAGES, ROOT, module_of

MODULES = [
    ".".join(path.relative_to(ROOT / "packages" / package / "src").with_suffix("").parts)
    for package in PACKAGES
    for path in sorted((ROOT / "packages" / package / "src" / module_of(package)).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_an_example_of_a_docstring_prints_what_it_shows(module: str) -> None:
    """In a namespace that holds the names of its module."""
    outcome = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_some_docstrings_have_examples() -> None:
    """Otherwise the test above would run nothing."""
    assert len(MODULES) >= 3
