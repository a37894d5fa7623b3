"""Public names are frozen in one file, so that every change is visible in review."""

import importlib
import tomllib

import pytest

from packages import PACKAGES, ROOT, module_of

FROZEN: dict[str, list[str]] = tomllib.loads((ROOT / "tests" / "public_names.toml").read_text())


def test_every_package_has_its_frozen_names() -> None:
    """The frozen list has exactly the modules of the packages."""
    assert {name.split(".")[0] for name in FROZEN} == {module_of(package) for package in PACKAGES}


@pytest.mark.parametrize("module", FROZEN)
def test_the_public_names_are_the_frozen_ones(module: str) -> None:
    """`__all__` equals the frozen list in the same (sorted) order, and all names exist."""
    imported = importlib.import_module(module)
    assert list(imported.__all__) == FROZEN[module]
    assert all(hasattr(imported, name) for name in imported.__all__)


@pytest.mark.parametrize("module", FROZEN)
def test_every_public_name_is_documented(module: str) -> None:
    """Every public callable has a docstring."""
    imported = importlib.import_module(module)
    for name in imported.__all__:
        value = getattr(imported, name)
        if callable(value):
            assert (value.__doc__ or "").strip(), f"{module}.{name} has no docstring"
