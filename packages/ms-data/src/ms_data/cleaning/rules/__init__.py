"""Cleaning rules; every module defines its class as `RULE`."""

from importlib import import_module
from pkgutil import iter_modules

from ms_data.cleaning.rule import Rule

__all__ = ["RULES"]

RULES: dict[str, type[Rule]] = {
    module.name: import_module(f"{__name__}.{module.name}").RULE
    for module in iter_modules(__path__)
}
"""Rules by module name."""
