"""Names used by Meta: the MTIA runtime."""

from typing import Final

from ms_profile.vendors.category import Category
from ms_profile.vendors.vendor import Vendor

VENDOR: Final = Vendor(labels={"mtia_runtime": Category.RUNTIME})
