"""Packing rules; every module defines its `Packer` as `RULE`."""

from importlib import import_module
from pkgutil import iter_modules

from ms_data.streams.packer import Packer

__all__ = ["PACKING_RULES"]

PACKING_RULES: dict[str, type[Packer]] = {
    module.name: import_module(f"{__name__}.{module.name}").RULE
    for module in iter_modules(__path__)
}
"""Packing rules by module name."""
