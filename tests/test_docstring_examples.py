"""Every `>>>` example in a docstring runs and prints the output that the docstring shows."""

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
def test_a_docstring_example_prints_the_shown_output(module: str) -> None:
    """The examples run in the namespace of their module."""
    outcome = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_some_docstrings_have_examples() -> None:
    """Otherwise the test above would run nothing."""
    assert len(MODULES) >= 3
