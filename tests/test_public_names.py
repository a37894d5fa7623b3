"""The names that users type are frozen: a change to them shows in review, in one file."""

import importlib
import tomllib

import pytest

from packages import PACKAGES, ROOT, module_of

FROZEN: dict[str, list[str]] = tomllib.loads((ROOT / "tests" / "public_names.toml").read_text())


def test_every_package_has_its_frozen_names() -> None:
    """The frozen list speaks of exactly the modules that exist."""
    assert {name.split(".")[0] for name in FROZEN} == {module_of(package) for package in PACKAGES}


@pytest.mark.parametrize("module", FROZEN)
def test_the_public_names_are_the_frozen_ones(module: str) -> None:
    """`__all__` equals the frozen list, in its order (which ruff keeps sorted), and is there."""
    found = importlib.import_module(module)
    assert list(found.__all__) == FROZEN[module]
    assert all(hasattr(found, name) for name in found.__all__)


@pytest.mark.parametrize("module", FROZEN)
def test_every_public_name_is_documented(module: str) -> None:
    """What users type has a docstring."""
    found = importlib.import_module(module)
    for name in found.__all__:
        thing = getattr(found, name)
        if callable(thing):
            assert (thing.__doc__ or "").strip(), f"{module}.{name} has no docstring"
