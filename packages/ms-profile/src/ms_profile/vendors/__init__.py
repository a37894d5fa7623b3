"""Names that each vendor uses in traces, one module per vendor; those with `VENDOR` are registered.

Both recording and trace reading use these names, so this package is below both.
"""

import re
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from ms_profile.vendors.vendor import Vendor

__all__ = ["VENDORS", "any_vendors"]

VENDORS: Final[tuple[Vendor, ...]] = tuple(
    module.VENDOR
    for module_info in iter_modules(__path__)
    if hasattr(module := import_module(f"{__name__}.{module_info.name}"), "VENDOR")
)


def any_vendors(*fields: str, start: str = "", end: str = "") -> re.Pattern[str]:
    """Return a pattern matching these fields' names of all vendors, between `start` and `end`."""
    names = [getattr(vendor, field) for field in fields for vendor in VENDORS]
    return re.compile(f"{start}(?:{'|'.join(filter(None, names))}){end}")
