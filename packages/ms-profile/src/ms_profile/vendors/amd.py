"""AMD's names: HIP's runtime; Kineto writes its calls under CUDA's labels."""

from typing import Final

from ms_profile.vendors.vendor import Vendor

__all__ = ["VENDOR"]

VENDOR: Final = Vendor(
    synchronising_call=r"hip\w*Synchronize",
    allocation_call=r"hip(Malloc|Free)(Async|Host)?$|hipHostAlloc$",
)
