"""Names used by Intel: the XPU runtime and oneCCL."""

from typing import Final

from ms_profile.vendors.category import Category
from ms_profile.vendors.vendor import Vendor

VENDOR: Final = Vendor(
    labels={"xpu_runtime": Category.RUNTIME},
    device_backend="xccl",
    collective_kernel="oneccl",
)
