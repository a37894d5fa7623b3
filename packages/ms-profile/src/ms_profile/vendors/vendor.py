"""The names that one vendor's profiler, driver and communication library write into traces.

All but the labels are regular expressions; each is matched from the start of a name.
"""

from collections.abc import Mapping

from attrs import field, frozen

from ms_profile.vendors.category import Category


@frozen(kw_only=True)
class Vendor:
    """One vendor's names; what a vendor has none of stays empty."""

    labels: Mapping[str, Category] = field(factory=dict)
    """The category of each value of an event's `cat`."""
    processes: Mapping[str, Category] = field(factory=dict)
    """The category of events without a label, by "process/thread"; the first that matches."""
    host_backend: str = ""
    """Process-group backends whose collectives a thread of the host carries out."""
    device_backend: str = ""
    """Process-group backends whose collectives are kernels, launched by the host."""
    collective_kernel: str = ""
    """Kernels that communicate."""
    copy_kernel: str = ""
    """Events of a device's process that copy; they carry no label."""
    wait_kernel: str = ""
    """Events in which a stream waits."""
    communication_operator: str = ""
    """Operators on the host that only launch communication."""
    synchronizing_call: str = ""
    """Calls in which the host waits for the device."""
    allocation_call: str = ""
    """Calls that take memory from the driver, or give it back."""
    trace_files: str = ""
    """A glob, from the profiler's output folder, of the traces in it."""
