"""Intel's names: the XPU's runtime, oneCCL."""

from typing import Final

from ms_profile.vendors.category import Category
from ms_profile.vendors.vendor import Vendor

VENDOR: Final = Vendor(
    labels={"xpu_runtime": Category.RUNTIME},
    device_backend="xccl",
    collective_kernel="oneccl",
)
