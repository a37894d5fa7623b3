"""Names used by AMD: the HIP runtime, whose calls Kineto labels as CUDA's."""

from typing import Final

from ms_profile.vendors.vendor import Vendor

VENDOR: Final = Vendor(
    synchronizing_call=r"hip\w*Synchronize",
    allocation_call=r"hip(Malloc|Free)(Async|Host)?$|hipHostAlloc$",
)
