"""What vendors call things, one file a vendor: a file here that holds `VENDOR` is found by itself.

Recording and trace reading both know names, so this room lies below both.
"""

import re
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from ms_profile.vendors.vendor import Vendor

__all__ = ["VENDORS", "any_vendors"]

VENDORS: Final[tuple[Vendor, ...]] = tuple(
    module.VENDOR
    for found in iter_modules(__path__)
    if hasattr(module := import_module(f"{__name__}.{found.name}"), "VENDOR")
)


def any_vendors(*fields: str, start: str = "", end: str = "") -> re.Pattern[str]:
    """Return a pattern of the names in these fields of all vendors, between `start` and `end`."""
    names = [getattr(vendor, field) for field in fields for vendor in VENDORS]
    return re.compile(f"{start}(?:{'|'.join(filter(None, names))}){end}")
