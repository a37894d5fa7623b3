"""Names used by NVIDIA: the CUDA runtime and driver, and NCCL."""

from typing import Final

from ms_profile.vendors.category import Category
from ms_profile.vendors.vendor import Vendor

VENDOR: Final = Vendor(
    labels={
        "cuda_runtime": Category.RUNTIME,
        "cuda_driver": Category.RUNTIME,
        "cuda_sync": Category.DEVICE_WAIT,
    },
    device_backend="nccl",
    collective_kernel="ncclDevKernel|ncclKernel|nccl[A-Z]",
    communication_operator="nccl:",
    synchronizing_call=r"cuda\w*Synchronize",
    trace_files=("*.sqlite",),
    database_tables=("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"),
    database_reader="ms_profile.trace.from_nsys",
    allocation_call=r"cuda(Malloc|Free)(Async|Host)?$|cudaHostAlloc$|cuMem(Alloc|Free|Create|"
    r"Release|Map|Unmap|SetAccess|AddressReserve|AddressFree)\w*$",
)
