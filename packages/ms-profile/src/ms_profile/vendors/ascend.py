"""Names used by Ascend: the CANN runtime, HCCL, and the processes in `trace_view.json`.

That file lists communication twice: the collectives of each group, which are used here, and their
parts on planes, which are not.
"""

from typing import Final

from ms_profile.vendors.category import Category
from ms_profile.vendors.vendor import Vendor

VENDOR: Final = Vendor(
    labels={"GC": Category.ANNOTATION},
    processes={
        "Ascend Hardware/": Category.KERNEL,
        "CANN/": Category.RUNTIME,
        "(Communication|HCCL).*/.*Communication": Category.COLLECTIVE,
    },
    device_backend="hccl",
    collective_kernel="hcom_|HcclLaunch",
    copy_kernel="MEMCPY|Memcpy|SDMA",
    # `aclrt` events and HCCL's notifications between devices.
    wait_kernel="EVENT_WAIT|EVENT_RECORD|Notify[_ ]Wait|Notify[_ ]Record|NOTIFY",
    synchronizing_call=r"acl\w*Synchronize",
    allocation_call=r"aclrt(Malloc|Free)\w*$",
    trace_files=(
        "**/ASCEND_PROFILER_OUTPUT/trace_view.json",
        "**/ascend_pytorch_profiler*.db",
        "**/msprof_*.db",
    ),
    database_tables=("STRING_IDS", "TASK", "PYTORCH_API"),
    database_reader="ms_profile.trace.from_ascend",
)
