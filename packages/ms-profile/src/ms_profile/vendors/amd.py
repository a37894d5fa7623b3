"""AMD's names: HIP's runtime; Kineto writes its calls under CUDA's labels."""

from typing import Final

from ms_profile.vendors.vendor import Vendor

VENDOR: Final = Vendor(
    synchronizing_call=r"hip\w*Synchronize",
    allocation_call=r"hip(Malloc|Free)(Async|Host)?$|hipHostAlloc$",
)
